"""Rules on top of the store, which the client and the agent share."""
