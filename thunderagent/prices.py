"""What AWS asks for, on demand in us-east-1 (since November 2024), for costs in metrics and benchmarks.

https://aws.amazon.com/dynamodb/pricing/on-demand/, https://aws.amazon.com/sqs/pricing/,
https://aws.amazon.com/cloudwatch/pricing/.
"""

from __future__ import annotations

from typing import Final

WRITE_DOLLARS: Final = 0.625
"""A million write units of DynamoDB."""
READ_DOLLARS: Final = 0.125
"""A million read units of DynamoDB."""
SQS_DOLLARS: Final = 0.40
"""A million requests of a standard queue of SQS."""
SQS_FREE: Final = 1e6
"""Of those, how many are free each month."""
METRIC_DOLLARS: Final = 0.30
"""A metric of CloudWatch for a month, prorated by the hours in which it is sent; of the first 10,000."""
PUT_DOLLARS: Final = 0.01
"""A thousand PutMetricData requests of CloudWatch."""
MONTH_S: Final = 730 * 3600.0
"""A month, as AWS counts it."""


def store_dollars(*, read_units: float = 0.0, write_units: float = 0.0) -> float:
    """What units of DynamoDB cost."""
    return (read_units * READ_DOLLARS + write_units * WRITE_DOLLARS) / 1e6
