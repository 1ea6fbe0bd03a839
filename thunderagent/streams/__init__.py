"""WebSocket streams as jobs. `connection/` is an asyncio library over `websockets` without tasks, leases or stores."""
