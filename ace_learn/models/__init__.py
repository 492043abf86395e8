"""Targets: loading, hidden-state capture, key-value cache."""
