"""Speculative decoding: counter-based noise, acceptance, drafters, the finish window."""
