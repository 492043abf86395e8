"""Studies of speculation: acceptance rules, what predicts acceptance, adaptive verification."""
