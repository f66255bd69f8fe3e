"""Deterministic simulation of toolroll's distributed parts under faults.

python -m tests.simulation run 42                  # replay a seed
python -m tests.simulation limiter 0 --count 5000  # search for a seed that fails
"""
