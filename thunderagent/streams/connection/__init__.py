"""The connection of a stream: it reconnects, watches its peer, buffers, and knows its place in the stream."""
