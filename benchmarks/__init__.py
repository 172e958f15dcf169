"""Benchmarks: ratios of times measured in turns; see ``python -m benchmarks -h``."""
