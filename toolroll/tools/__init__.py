"""Tools: the base class, the `@tool` decorator, the built-in tools, and their registry."""
