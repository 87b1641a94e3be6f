"""Benchmarks: each measures ours and its reference in one run and prints the ratio."""
