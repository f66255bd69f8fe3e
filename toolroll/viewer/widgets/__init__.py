"""Widgets of the viewer."""
