"""AFMP: an image model whose patches exchange gated messages along a fixed scaffold."""
