"""A rollout without a GPU: a model that plays a script, with a small tokenizer. Everything else is real."""
