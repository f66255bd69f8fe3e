"""Records: the trajectories that rollouts write to disk, and tools to read, summarise and convert them."""
