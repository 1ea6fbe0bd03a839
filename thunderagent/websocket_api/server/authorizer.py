"""The authorizer of `$connect`: checks the token of a client and names its user.

A token comes in the header `Authorization: Bearer …`. Browsers cannot set headers: theirs is a subprotocol beside
`thunderagent.v1`. A token in the query string must be allowed: URLs end up in logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thunderagent.model import edge_events
from thunderagent.model.bus import EventBus
from thunderagent.websocket_api.protocol import BEARER
from thunderagent.websocket_api.server.keys import KeysUnavailable
from thunderagent.websocket_api.server.tokens import TokenRefused, UserRefused, Verifier

QUERY_NAMES: Final = ("token", "access_token")


class Unauthorized(Exception):
    """API Gateway answers 401 for an error of exactly this text."""

    def __init__(self) -> None:
        super().__init__("Unauthorized")


class Authorizer:
    """Decides who may connect. `bus` gets the refusals with their reasons."""

    def __init__(self, verifier: Verifier, *, query_token: bool = False, bus: EventBus | None = None) -> None:
        self.bus = bus or EventBus()
        self._verifier = verifier
        self._query_token = query_token

    def authorize(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a REQUEST authorizer: the user may connect, or may not (403).

        Raises:
            Unauthorized: there is no good token (401); a fresh one helps.
            KeysUnavailable: the keys of the issuer cannot be read (500).
        """
        try:
            identity = self._verifier.verify(self._token(event))
        except UserRefused as error:
            self._refused(event, 403, error)
            return _policy("nobody", "Deny", event, {})
        except TokenRefused as error:
            self._refused(event, 401, error)
            raise Unauthorized from None
        except KeysUnavailable as error:
            self._refused(event, 500, error)
            raise
        context = {"user": identity.user, "expires": f"{identity.expires_at:.0f}"}
        return _policy(identity.user, "Allow", event, context)

    def _token(self, event: Mapping[str, Any]) -> str:
        scheme, _, token = (header(event, "authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        for one in offered_protocols(event):
            if one.startswith(BEARER) and len(one) > len(BEARER):
                return one.removeprefix(BEARER)
        query = event.get("queryStringParameters") or {}
        for name in QUERY_NAMES:
            if isinstance(found := query.get(name), str) and found:
                if self._query_token:
                    return found
                raise TokenRefused(
                    "the token is in the query string, which ends up in logs: send it in the header Authorization, or "
                    f"as the subprotocol '{BEARER}TOKEN'; or allow it with WSAPI_QUERY_TOKEN=1"
                )
        raise TokenRefused(f"there is no token: send 'Authorization: Bearer TOKEN', or the subprotocol '{BEARER}TOKEN'")

    def _refused(self, event: Mapping[str, Any], status: int, error: Exception) -> None:
        connection = str((event.get("requestContext") or {}).get("connectionId", ""))
        self.bus.emit(edge_events.ConnectionRefused(connection=connection, status=status, reason=str(error)))


def _policy(user: str, effect: str, event: Mapping[str, Any], context: Mapping[str, str]) -> dict[str, Any]:
    statement = {"Action": "execute-api:Invoke", "Effect": effect, "Resource": event.get("methodArn", "*")}
    return {
        "principalId": user,
        "policyDocument": {"Version": "2012-10-17", "Statement": [statement]},
        "context": dict(context),
    }


def header(event: Mapping[str, Any], name: str) -> str | None:
    """A header by its name in lower case; the last of several."""
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
    """The user that the authorizer found; None: there was no authorizer."""
    found = (event.get("requestContext") or {}).get("authorizer")
    user = found.get("principalId") if isinstance(found, Mapping) else None
    return user if isinstance(user, str) and user else None
