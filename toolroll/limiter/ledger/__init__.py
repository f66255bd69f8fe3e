"""Limits of a resource and their division among processes, by leases. Pure logic, and the service that runs it."""
