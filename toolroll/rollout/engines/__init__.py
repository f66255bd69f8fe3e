"""Inference engines: ids in, ids out."""
