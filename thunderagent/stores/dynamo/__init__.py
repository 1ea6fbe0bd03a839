"""The engine on Amazon DynamoDB."""
