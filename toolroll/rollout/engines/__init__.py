"""Inference engines: clients that take the token ids of a prompt and return the sampled ids."""
