"""The grant of a region: who may write, and how it moves."""
