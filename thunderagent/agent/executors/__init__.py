"""Where handlers run: threads, the event loop, processes."""
