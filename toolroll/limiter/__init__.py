"""How many may be in flight, over the whole cluster."""
