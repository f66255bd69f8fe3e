"""Whole runs: prompts from files, trajectories into files, in one process or on a cluster."""
