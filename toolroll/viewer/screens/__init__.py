"""Screens of the viewer."""
