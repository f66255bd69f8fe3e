"""Helpers shared by all layers. Not part of the public API."""
