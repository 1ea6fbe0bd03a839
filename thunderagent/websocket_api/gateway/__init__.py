"""A local gateway, which stands for API Gateway."""
