"""What the authorizer and the handler read in an event of API Gateway: headers, subprotocols, the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def header(event: Mapping[str, Any], name: str) -> str | None:
    """A header in whatever letters its name came; of several the last."""
    found = [
        value
        for key, value in (event.get("headers") or {}).items()
        if isinstance(key, str) and key.lower() == name and isinstance(value, str)
    ]
    return found[-1] if found else None


def offered_protocols(event: Mapping[str, Any]) -> list[str]:
    """The subprotocols that the client offers."""
    text = header(event, "sec-websocket-protocol") or ""
    return [one.strip() for one in text.split(",") if one.strip()]


def user_of(event: Mapping[str, Any]) -> str | None:
    """The user whom the authorizer found; None: there was no authorizer."""
    found = (event.get("requestContext") or {}).get("authorizer")
    user = found.get("principalId") if isinstance(found, Mapping) else None
    return user if isinstance(user, str) and user else None
