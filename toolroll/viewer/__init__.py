"""Terminal viewer for rollout dumps: `toolroll view`."""
