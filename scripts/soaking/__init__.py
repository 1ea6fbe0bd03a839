"""The soak: many tasks of all kinds while agents are killed, or while the network fails, and a verdict."""
