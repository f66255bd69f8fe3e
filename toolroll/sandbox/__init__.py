"""Code execution in a sandbox: wire types, client and server."""
