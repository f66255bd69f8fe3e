"""Runs over whole data sets: prompts from files, trajectories into files, in one process or on a Ray cluster."""
