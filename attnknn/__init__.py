"""Attn-KNN: a k-nearest-neighbour classifier that learns how much each neighbour counts."""
