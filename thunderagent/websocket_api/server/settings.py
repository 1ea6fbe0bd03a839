"""The settings `WSAPI_…` of the WebSocket API."""

from __future__ import annotations

from typing import Final, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from thunderagent.model.errors import ConfigurationError
from thunderagent.websocket_api.server.keys import Keys, fetch_url, read_jwks
from thunderagent.websocket_api.server.throttle import CONNECT_RATE, LOT, USER_BURST, USER_RATE
from thunderagent.websocket_api.server.tokens import Verifier

PREFIX: Final = "WSAPI_"

S = TypeVar("S", bound=BaseSettings)


class AuthorizerSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", hide_input_in_errors=True)

    issuer: str
    """The `iss` of good tokens."""
    audience: str
    """The `aud` of good tokens."""
    jwks_url: str = ""
    """URL of the public keys of the issuer, `https://…/.well-known/jwks.json`."""
    jwks: str = ""
    """The keys as JSON, instead of the URL."""
    query_token: bool = False
    """Take tokens in the query string too, where they end up in logs."""


class ApiSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", hide_input_in_errors=True)

    state_store: str
    """URL of the table of states, `dynamodb://TABLE?region=REGION`."""
    connection_store: str
    """URL of the table of connections of this region."""
    region: str
    """The region that replies name."""
    endpoint: str = ""
    """URL of the management API; empty: as AWS names it, by the id of the API and its stage."""
    user_rate: float = Field(USER_RATE, ge=1)
    """Messages of a user in a second; one connection may send half of them."""
    user_burst: float = Field(USER_BURST, ge=2 * LOT)
    """Messages of a user at one moment, at least three times the rate; one connection may send half of them."""
    connect_rate: float = Field(CONNECT_RATE, gt=0)
    """Connects of a user in a second."""


def load(kind: type[S]) -> S:
    """The settings of the environment; raises `ConfigurationError` for a missing or wrong one."""
    try:
        return kind()
    except ValidationError as error:
        texts = [f"{PREFIX}{'.'.join(map(str, one['loc'])).upper()}: {one['msg']}" for one in error.errors()]
        raise ConfigurationError(f"the environment of the WebSocket API: {'; '.join(texts)}") from None


def make_verifier(settings: AuthorizerSettings) -> Verifier:
    """The verifier of an issuer's tokens; raises `ConfigurationError` for missing or wrong keys."""
    if bool(settings.jwks) == bool(settings.jwks_url):
        raise ConfigurationError(f"set either {PREFIX}JWKS_URL or {PREFIX}JWKS: the public keys of the issuer")
    if settings.jwks:
        try:
            read_jwks(settings.jwks)
        except ValueError as error:
            raise ConfigurationError(f"{PREFIX}JWKS: {error}") from None
    keys = Keys(fetch_url(settings.jwks_url) if settings.jwks_url else lambda: settings.jwks)
    return Verifier(keys, issuer=settings.issuer, audience=settings.audience)
