"""Tests of the CloudFormation templates and of what deploys them."""
