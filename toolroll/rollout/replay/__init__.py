"""Rollouts whose tool results, and whose sampled tokens, come from a recording."""
