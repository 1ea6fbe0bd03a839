"""Limits: how many tasks of a kind run at once."""
