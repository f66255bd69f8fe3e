"""The command `toolroll`."""
