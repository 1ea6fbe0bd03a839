"""What is wrong with the value of a setting that names something at AWS; None: nothing."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit


def namespace_problem(name: str) -> str | None:
    """Of a namespace of CloudWatch."""
    if not re.fullmatch(r"[A-Za-z0-9._/#:-]{1,255}", name, re.ASCII) or name.startswith((":", "AWS/")):
        return f"is {name!r:.80}; use 1 to 255 letters, digits and . - _ / # :, not AWS/ at the beginning"
    return None


def queue_problem(url: str) -> str | None:
    """Of the URL of a queue of SQS."""
    parts = urlsplit(url)
    example = "https://sqs.eu-central-1.amazonaws.com/123456789012/thunderagent"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.count("/") != 2 or url.endswith("/"):
        return f"is not the URL of an SQS queue; write for example {example}"
    if url.endswith(".fifo"):
        return "is a FIFO queue, in which one ring would wait for another; use a standard queue"
    return None


def push_problem(endpoint: str) -> str | None:
    """Of the URL of a management API of API Gateway; on this machine http will do."""
    try:
        parts = urlsplit(endpoint)
        if parts.hostname and (parts.scheme == "https" or (parts.scheme == "http" and _is_here(parts.hostname))):
            return None
    except ValueError:
        pass
    return f"is {endpoint!r:.200}; use https://API.execute-api.REGION.amazonaws.com/STAGE (https, and not wss)"


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
