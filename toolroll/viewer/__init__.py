"""Looking at what rollouts left on disk: `toolroll view`."""
