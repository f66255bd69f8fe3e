"""Sandbox server: an HTTP application, zygote interpreters behind it, one jail per program."""
