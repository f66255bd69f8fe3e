"""Rollouts on a Ray cluster: coordinator, workers, worker pool."""
