"""Holds a WebSocket connection for days: reconnects, watches, buffers, and knows its place in the stream.

A pure asyncio library over `websockets`. It knows nothing of tasks, leases or stores; `thunderagent/stream.py` makes a
job of it.
"""
