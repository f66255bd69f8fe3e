"""Render samples as text: documents, layout, highlighting, tokens."""
