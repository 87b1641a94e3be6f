"""Metric names, the JSONL sink, the live view and the reward plot."""
