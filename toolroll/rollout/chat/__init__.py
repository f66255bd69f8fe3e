"""Conversion between messages and tokens for each model family."""
