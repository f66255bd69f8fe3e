"""One conversation, from prompt to trajectory."""
