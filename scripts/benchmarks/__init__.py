"""What `scripts/bench` is made of: places to measure on, processes to measure, and the report."""
