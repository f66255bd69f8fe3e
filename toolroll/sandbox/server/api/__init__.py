"""HTTP API of the sandbox server: admission, idempotency, metrics."""
