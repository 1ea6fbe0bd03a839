"""Conditional writes as data, one module for each owner."""
