"""Reward functions: scores for code that runs in a sandbox, and for GSM8K answers."""
