"""Ablations: every variant of heads and exit policies on the same stored probes, at the same certified risk."""
