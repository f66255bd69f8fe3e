"""The sandbox server: a front, warm interpreters behind it, one jail per execution."""
