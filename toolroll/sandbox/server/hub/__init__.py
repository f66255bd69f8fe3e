"""The hub of a sandbox server: admission, sessions, idempotency keys, fences and metrics of all its fronts."""
