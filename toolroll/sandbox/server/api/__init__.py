"""HTTP API of the sandbox server."""
