"""An issuer of tokens for development and tests, with a key pair of its own."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from thunderagent.model.bus import EventBus
from thunderagent.websocket_api.server.authorizer import Authorizer
from thunderagent.websocket_api.server.keys import Keys
from thunderagent.websocket_api.server.tokens import Verifier

ISSUER: Final = "https://issuer.example/"
AUDIENCE: Final = "thunderagent"


class Issuer:
    """Makes tokens for any user. Never for production: it asks for no password.

    Args:
        issuer: the `iss` of its tokens.
        audience: their `aud`.
        now: epoch seconds.
    """

    def __init__(self, issuer: str = ISSUER, audience: str = AUDIENCE, *, now: Callable[[], float] = time.time) -> None:
        self.issuer = issuer
        self.audience = audience
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._kid = secrets.token_hex(8)

    @property
    def jwks(self) -> str:
        """Its public key, for `WSAPI_JWKS`."""
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key()))
        return json.dumps({"keys": [{**public, "kid": self._kid, "use": "sig", "alg": "ES256"}]})

    def token(self, user: str, *, expires_s: float = 3600.0, **claims: Any) -> str:
        """A token of a user.

        Args:
            user: its `sub`.
            expires_s: seconds until it ends; below 0: it has ended.
            claims: further or other claims; None leaves one out.
        """
        now = self._now()
        all_claims = {
            "iss": self.issuer,
            "aud": self.audience,
            "sub": user,
            "iat": int(now),
            "exp": int(now + expires_s),
            **claims,
        }
        kept = {name: value for name, value in all_claims.items() if value is not None}
        return jwt.encode(kept, self._key, algorithm="ES256", headers={"kid": self._kid})

    def verifier(self) -> Verifier:
        """A verifier of its tokens."""
        return Verifier(Keys(lambda: self.jwks), issuer=self.issuer, audience=self.audience, now=self._now)

    def authorizer(self, bus: EventBus | None = None) -> Authorizer:
        """An authorizer that takes its tokens."""
        return Authorizer(self.verifier(), bus=bus)
