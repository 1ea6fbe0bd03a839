"""The agent: it claims tasks, runs them and keeps their leases."""
