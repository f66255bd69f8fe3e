"""Statistics over records, and their plots."""
