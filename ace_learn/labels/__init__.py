"""Labels: rollouts, probes at every paragraph end, minimal reasoning, targets."""
