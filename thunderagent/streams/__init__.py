"""WebSocket streams as jobs: the decorator, its context and journal, and the connection that lasts for days.

`connection/` is a pure asyncio library over `websockets`, which knows nothing of tasks, leases or stores.
"""
