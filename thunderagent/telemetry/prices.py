"""Prices of AWS in us-east-1 (since November 2024), for metrics, benchmarks and docs.

https://aws.amazon.com/dynamodb/pricing/on-demand/, https://aws.amazon.com/dynamodb/pricing/provisioned/,
https://aws.amazon.com/sqs/pricing/, https://aws.amazon.com/cloudwatch/pricing/.
"""

from __future__ import annotations

from typing import Final

WRITE_DOLLARS: Final = 0.625
"""A million write units of DynamoDB on demand."""
READ_DOLLARS: Final = 0.125
"""A million read units of DynamoDB on demand."""
PROVISIONED_WRITE_DOLLARS: Final = 0.00065
"""A write unit a second of DynamoDB, kept ready for an hour."""
PROVISIONED_READ_DOLLARS: Final = 0.00013
"""A read unit a second of DynamoDB, kept ready for an hour."""
SQS_DOLLARS: Final = 0.40
"""A million requests of a standard queue of SQS."""
SQS_FREE: Final = 1e6
"""Requests of SQS that are free each month."""
METRIC_DOLLARS: Final = 0.30
"""A metric of CloudWatch for a month, prorated by the hours in which it is sent; of the first 10,000."""
ALARM_DOLLARS: Final = 0.10
"""An alarm of CloudWatch on one metric for a month."""
INSIGHTS_RULE_DOLLARS: Final = 0.50
"""A rule of Contributor Insights for a month."""
INSIGHTS_EVENT_DOLLARS: Final = 0.03
"""A million events that match a rule of Contributor Insights for DynamoDB."""
PUT_DOLLARS: Final = 0.01
"""A thousand PutMetricData requests of CloudWatch."""
MONTH_S: Final = 730 * 3600.0
"""A month, as AWS counts it."""


def store_dollars(*, read_units: float = 0.0, write_units: float = 0.0) -> float:
    """Price of units of DynamoDB."""
    return (read_units * READ_DOLLARS + write_units * WRITE_DOLLARS) / 1e6
