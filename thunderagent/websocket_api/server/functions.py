"""The two Lambda functions of the WebSocket API, each made for its first event. Nothing imports this module."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import load_settings
from thunderagent.stores import open_engine
from thunderagent.telemetry.logs import Telemetry, configure_logging
from thunderagent.websocket_api.push import ManagementApi
from thunderagent.websocket_api.server.authorizer import Authorizer
from thunderagent.websocket_api.server.handler import WebSocketApi
from thunderagent.websocket_api.server.settings import PREFIX, ApiSettings, AuthorizerSettings, load, make_verifier
from thunderagent.websocket_api.server.throttle import Rates

_authorizer: Authorizer | None = None
_api: WebSocketApi | None = None


def authorize(event: Mapping[str, Any], context: object = None) -> dict[str, Any]:
    """The authorizer of `$connect`.

    Raises:
        Unauthorized: there is no good token.
        ConfigurationError: the settings cannot work.
    """
    global _authorizer
    if _authorizer is None:
        _authorizer = make_authorizer()
    return _authorizer.authorize(event)


def handle(event: Mapping[str, Any], context: object = None) -> dict[str, Any]:
    """The handler of all routes.

    Raises:
        ConfigurationError: the settings cannot work.
    """
    global _api
    if _api is None:
        _api = make_api(event)
    return _api.handle(event)


def make_authorizer() -> Authorizer:
    settings = load(AuthorizerSettings)
    return Authorizer(make_verifier(settings), query_token=settings.query_token, bus=_logged())


def make_api(event: Mapping[str, Any]) -> WebSocketApi:
    settings = load(ApiSettings)
    management = ManagementApi(settings.endpoint or management_endpoint(event))
    return WebSocketApi(
        open_engine(settings.state_store, hasty=True),
        open_engine(settings.connection_store, hasty=True),
        region=settings.region,
        post=management.post,
        end=management.end,
        bus=_logged(),
        rates=Rates(user_rate=settings.user_rate, user_burst=settings.user_burst, connect_rate=settings.connect_rate),
    )


def management_endpoint(event: Mapping[str, Any]) -> str:
    """Where API Gateway takes pushes, as AWS names it. The domain of an event may be a custom one, which takes none."""
    about = event.get("requestContext") or {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region or not about.get("apiId") or not about.get("stage"):
        raise ConfigurationError(f"the event does not say the endpoint for pushes: set {PREFIX}ENDPOINT")
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"https://{about['apiId']}.execute-api.{region}.{suffix}/{about['stage']}"


def _logged() -> EventBus:
    """A bus whose events become log lines, by the settings of agents."""
    try:
        settings = load_settings()
        configure_logging(settings.log_level, as_json=settings.log_json, redact=settings.log_redact, stream=sys.stderr)
    except ConfigurationError:
        configure_logging(stream=sys.stderr)
    bus = EventBus()
    Telemetry(bus)
    return bus
