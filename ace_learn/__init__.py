"""Learned early-exit predictors for reasoning models."""
