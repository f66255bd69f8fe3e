"""The fronts of a sandbox server: they handle connections, in one or more processes."""
