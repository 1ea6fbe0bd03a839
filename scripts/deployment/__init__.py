"""What `scripts/deploy` and `scripts/destroy` do: the stacks of `infra/` in their order, on AWS or a local engine."""
