"""The Lambda functions of the WebSocket API, made of the settings `WSAPI_…` of their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import load_settings
from thunderagent.stores import open_engine
from thunderagent.telemetry.logs import Telemetry, configure_logging
from thunderagent.websocket_api.push import ManagementApi
from thunderagent.websocket_api.server.authorizer import Authorizer
from thunderagent.websocket_api.server.handler import WebSocketApi
from thunderagent.websocket_api.server.keys import Keys, fetch_url, read_jwks
from thunderagent.websocket_api.server.throttle import CONNECT_RATE, LOT, USER_BURST, USER_RATE
from thunderagent.websocket_api.server.tokens import Verifier

PREFIX: Final = "WSAPI_"

S = TypeVar("S", bound=BaseSettings)


class AuthorizerSettings(BaseSettings):
    """What the authorizer needs."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", hide_input_in_errors=True)

    issuer: str
    """The `iss` of good tokens."""
    audience: str
    """The `aud` of good tokens."""
    jwks_url: str = ""
    """Where the issuer publishes its public keys, `https://…/.well-known/jwks.json`."""
    jwks: str = ""
    """The keys themselves as JSON, in the place of the URL."""
    query_token: bool = False
    """Take tokens in the query string too, where they end up in logs."""


class ApiSettings(BaseSettings):
    """What the handler of the routes needs."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", hide_input_in_errors=True)

    state_store: str
    """URL of the table of states, `dynamodb://TABLE?region=REGION`."""
    connection_store: str
    """URL of the table of connections of this region."""
    region: str
    """The region, as replies tell it."""
    endpoint: str = ""
    """Of the management API; empty: as AWS names it, by the id of the API and its stage."""
    user_rate: float = Field(USER_RATE, ge=1)
    """Messages of a user in a second; a connection may send half of them."""
    user_burst: float = Field(USER_BURST, ge=2 * LOT)
    """Messages of a user at one moment; the same. Three times the rate is taken at least."""
    connect_rate: float = Field(CONNECT_RATE, gt=0)
    """Connects of a user in a second."""


def make_authorizer() -> Authorizer:
    """The authorizer of the environment.

    Raises:
        ConfigurationError: a setting is missing or cannot work.
    """
    settings = authorizer_settings()
    return Authorizer(make_verifier(settings), query_token=settings.query_token, bus=_logged())


def authorizer_settings() -> AuthorizerSettings:
    """Those of the environment.

    Raises:
        ConfigurationError: a setting is missing or no value for it.
    """
    return _load(AuthorizerSettings)


def make_verifier(settings: AuthorizerSettings) -> Verifier:
    """What checks the tokens of an issuer.

    Raises:
        ConfigurationError: the keys are missing or cannot work.
    """
    if bool(settings.jwks) == bool(settings.jwks_url):
        raise ConfigurationError(f"set either {PREFIX}JWKS_URL or {PREFIX}JWKS: the public keys of the issuer")
    if settings.jwks:
        try:
            read_jwks(settings.jwks)
        except ValueError as error:
            raise ConfigurationError(f"{PREFIX}JWKS: {error}") from None
    keys = Keys(fetch_url(settings.jwks_url) if settings.jwks_url else lambda: settings.jwks)
    return Verifier(keys, issuer=settings.issuer, audience=settings.audience)


def make_api(event: Mapping[str, Any]) -> WebSocketApi:
    """The handler of the environment.

    Args:
        event: one of the API, which tells its id and stage.

    Raises:
        ConfigurationError: a setting is missing or cannot work.
    """
    settings = _load(ApiSettings)
    management = ManagementApi(settings.endpoint or management_endpoint(event))
    return WebSocketApi(
        open_engine(settings.state_store, hasty=True),
        open_engine(settings.connection_store, hasty=True),
        region=settings.region,
        post=management.post,
        end=management.end,
        bus=_logged(),
        user_rate=settings.user_rate,
        user_burst=settings.user_burst,
        connect_rate=settings.connect_rate,
    )


def management_endpoint(event: Mapping[str, Any]) -> str:
    """Where API Gateway takes pushes, as AWS names it. The domain of the event may be the user's own: it takes none."""
    about = event.get("requestContext") or {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region or not about.get("apiId") or not about.get("stage"):
        raise ConfigurationError(f"the endpoint for pushes cannot be told from the event: set {PREFIX}ENDPOINT")
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"https://{about['apiId']}.execute-api.{region}.{suffix}/{about['stage']}"


def _load(kind: type[S]) -> S:
    try:
        return kind()
    except ValidationError as error:
        told = "; ".join(f"{PREFIX}{'.'.join(map(str, one['loc'])).upper()}: {one['msg']}" for one in error.errors())
        raise ConfigurationError(f"the environment of the WebSocket API: {told}") from None


def _logged() -> EventBus:
    """A bus whose events become log lines, as agents write them with the same settings."""
    try:
        settings = load_settings()
        configure_logging(settings.log_level, as_json=settings.log_json, redact=settings.log_redact, stream=sys.stderr)
    except ConfigurationError:
        configure_logging(stream=sys.stderr)
    bus = EventBus()
    Telemetry(bus)
    return bus
