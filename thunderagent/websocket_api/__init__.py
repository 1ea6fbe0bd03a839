"""The WebSocket API: durable state of users behind Amazon's API Gateway, as plain functions of an event.

`server.functions` has the functions for AWS Lambda; `gateway` serves the same on one machine.
"""
