"""Run Python programs in children of a zygote: the code inside the zygote, and the server's handle on it."""
