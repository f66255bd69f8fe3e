"""Isolation of a process: namespaces, root file system, cgroups, Landlock, seccomp."""
