"""The canary: tries, again and again, what a user of a WebSocket API does, and what a user of the queue does."""
