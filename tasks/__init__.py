"""Prompt sets with their rewards."""
