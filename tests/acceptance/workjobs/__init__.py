"""Jobs of the acceptance tests: an agent imports this package as `workjobs`."""
