"""The functions behind the WebSocket API."""
