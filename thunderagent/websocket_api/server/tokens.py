"""Checks the tokens (JWT) of clients: signature, issuer, audience and time. The user is the `sub`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.model.errors import ConfigurationError
from thunderagent.websocket_api.server.keys import Jwk, Keys

try:
    import jwt
except ImportError as missing:  # an extra
    raise ConfigurationError("tokens are checked with PyJWT: pip install 'thunderagent[wsapi]'") from missing

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""All have a key pair. With a shared secret, or without a signature, the API could make tokens too."""
LEEWAY_S: Final = 30.0
"""Greatest difference between the clocks of issuer and API."""
LEAST_RSA_BITS: Final = 2048
"""Shorter RSA keys are refused: NIST allows none since 2014, and one forged token opens every state."""
LONGEST_TOKEN: Final = 8192
"""Letters; API Gateway takes 10 KB of all headers together."""

_USER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~@|:+=/-]{0,127}")


class TokenRefused(Exception):
    """The client has no good token. The reason does not contain it."""


class UserRefused(TokenRefused):
    """The token is good, but its `sub` cannot be a user."""


@dataclass(frozen=True, slots=True)
class Identity:
    user: str
    expires_at: float


class Verifier:
    """Checks tokens by the keys, the `iss` and the `aud` of an issuer. Safe in threads.

    Raises:
        ConfigurationError: issuer or audience is empty.
    """

    def __init__(self, keys: Keys, *, issuer: str, audience: str, now: Callable[[], float] = time.time) -> None:
        if not issuer or not audience:
            raise ConfigurationError("tokens need an issuer and an audience, or those made for others would count")
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._now = now

    def verify(self, token: str) -> Identity:
        """The user of a token.

        Raises:
            TokenRefused: the token is no good.
            UserRefused: its `sub` cannot be the id of a user.
            KeysUnavailable: the keys of the issuer cannot be read.
        """
        if len(token) > LONGEST_TOKEN:
            raise TokenRefused(f"the token has {len(token)} letters, more than {LONGEST_TOKEN}")
        try:
            head = jwt.get_unverified_header(token)
            algorithm, kid = head.get("alg"), head.get("kid")
            if algorithm not in ALGORITHMS:
                raise TokenRefused(
                    f"the token is signed with {str(algorithm)[:20]!r}; use one of {', '.join(ALGORITHMS)}"
                )
            key = self._keys.find(kid if isinstance(kid, str) else None)
            if key is None:
                raise TokenRefused(f"the issuer has no key {str(kid)[:80]!r}")
            claims = jwt.decode(
                token,
                key=_public_key(key, algorithm),
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    "verify_exp": False,  # below, by `now`
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise TokenRefused(f"the token does not count: {error}") from None
        return self._identity(claims)

    def _identity(self, claims: dict[str, Any]) -> Identity:
        now = self._now()
        expires_at, begins_at = _moment(claims["exp"], "exp"), _moment(claims.get("nbf", 0), "nbf")
        if expires_at + LEEWAY_S <= now:
            raise TokenRefused(f"the token is over since {now - expires_at:.0f} s")
        if begins_at - LEEWAY_S > now:
            raise TokenRefused(f"the token counts only in {begins_at - now:.0f} s")
        user = claims["sub"]
        if not isinstance(user, str) or not _USER.fullmatch(user):
            raise UserRefused("the `sub` of the token is no user id: 1 to 128 of A-Z a-z 0-9 . _ ~ @ | : + = / -")
        return Identity(user, expires_at)


def _public_key(key: Jwk, algorithm: str) -> Any:
    if key.get("alg", algorithm) != algorithm:
        raise TokenRefused(f"the token is signed with {algorithm}, its key is for {str(key['alg'])[:20]}")
    public = jwt.PyJWK(dict(key), algorithm=algorithm).key
    if key.get("kty") == "RSA" and public.key_size < LEAST_RSA_BITS:
        raise TokenRefused(
            f"the RSA key {str(key.get('kid'))[:80]!r} has {public.key_size} bits: let the issuer sign with one of "
            f"{LEAST_RSA_BITS} bits or more"
        )
    return public


def _moment(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e12:
        raise TokenRefused(f"the `{name}` of the token is no time")
    return float(value)
