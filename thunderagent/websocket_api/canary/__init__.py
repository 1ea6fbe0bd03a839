"""The canary: tries at intervals what the users of a WebSocket API and of the queue do."""
