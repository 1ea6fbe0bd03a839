"""What `scripts/bench` is made of: a harness, the processes that are measured, and one module for each measurement."""
