"""Concurrency limits that all processes of a Ray cluster share."""
