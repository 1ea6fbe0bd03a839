"""The WebSocket API: durable state of users behind Amazon's API Gateway, as plain functions of an event.

`authorizer.handler` and `handler.handler` are for AWS Lambda; `gateway.Gateway` serves the same on one machine.
"""
