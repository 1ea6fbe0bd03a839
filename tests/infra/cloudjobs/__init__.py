"""Jobs of the agents that run against a deployed table."""
