"""The canary."""
