"""Training of draft modules: traces, the unrolled objective, signals with it, adapters, export."""
