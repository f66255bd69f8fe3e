"""Adapters that run toolroll's rollouts inside other trainers."""
