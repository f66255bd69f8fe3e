"""Compute rewards of recorded trajectories again."""
