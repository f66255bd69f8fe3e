"""Execution of programs and sessions: jobs, output, languages, isolation tiers."""
