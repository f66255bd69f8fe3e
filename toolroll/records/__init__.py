"""What a rollout leaves on disk."""
