"""A simulated global table: replicas with delayed, last-writer-wins replication."""
