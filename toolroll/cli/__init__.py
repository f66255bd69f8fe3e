"""The `toolroll` command."""
