"""Gets the token of a canary, for every attempt again, so that a replaced token is used at once.

No message and no log line contains a token, or what it is made of.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import shlex
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from thunderagent.model.canary_targets import From, TokenSource
from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ConfigurationError, ThunderAgentError
from thunderagent.model.rows import as_map, is_number

LARGEST: Final = 16_384
"""Bytes of a token, and of an answer that holds one."""

ASK_S: Final = 5.0
"""Longest time of a command, or of a server that gives tokens."""

EARLY_S: Final = 60.0
"""Seconds before its end at which a token of a server is replaced."""

TARGET_VARIABLE: Final = "THUNDERAGENT_CANARY_TARGET"
"""Names the target to a command."""


WARN_DAYS: Final = 7.0
"""Days before its end at which a token that nothing seems to replace is reported."""

SHORT_DAYS: Final = 14.0
"""Something replaces a token with a shorter life, unless less than a tenth of it is left."""


class TokenUnavailable(ThunderAgentError):
    """There is no token for a canary now. The message holds no secret."""


class Tokens:
    """The tokens of the targets of one process.

    Args:
        source: text of a `TokenSource`; None: targets want no token.
        monotonic: the clock for the life of a server's tokens.

    Raises:
        ConfigurationError: the text names no source.
    """

    def __init__(self, source: str | None, *, monotonic: Callable[[], float] = since_boot) -> None:
        self._source = source
        if source is not None:
            TokenSource.parse(source)
        self._monotonic = monotonic
        self._kept: dict[str, tuple[str, float]] = {}
        self._under_way: set[str] = set()

    async def get(self, target: str) -> str | None:
        """The token for a target; None when targets want none. The caller may be cancelled at any moment.

        Raises:
            TokenUnavailable: there is none.
        """
        if self._source is None:
            return None
        token, ends = self._kept.get(target, ("", -math.inf))
        if self._monotonic() < ends:
            return token
        source = TokenSource.parse(self._source, target)
        token, lasts_s = await self._in_thread(target, source)
        if lasts_s > EARLY_S:
            self._kept[target] = (token, self._monotonic() + lasts_s - EARLY_S)
        return token

    def drop(self, target: str) -> None:
        """Forget a token that was refused."""
        self._kept.pop(target, None)

    def days_left(self, target: str, token: str, now: float) -> float | None:
        """Days until a token ends; None: it does not say, or something replaces it in time."""
        return None if target in self._kept else days_left(token, now)

    async def _in_thread(self, target: str, source: TokenSource) -> tuple[str, float]:
        """Fetch a token in a thread that the end of the process does not wait for; one thread for each target."""
        if target in self._under_way:
            raise TokenUnavailable(f"the last attempt to get the token from {source} has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, float]] = loop.create_future()

        def tell(found: tuple[str, float] | None, error: Exception | None) -> None:
            if answer.done():
                return
            if found is not None:
                answer.set_result(found)
            else:
                answer.set_exception(error or TokenUnavailable())

        def run() -> None:
            found: tuple[str, float] | None = None
            problem: Exception | None = None
            try:
                found = _fetch(source, target)
            except Exception as error:  # any error means that there is no token
                problem = error
            self._under_way.discard(target)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, found, problem)

        self._under_way.add(target)
        try:
            threading.Thread(target=run, name="canary-token", daemon=True).start()
        except RuntimeError as error:  # the machine has no thread left
            self._under_way.discard(target)
            raise TokenUnavailable(f"no token from {source}: {error}") from None
        return await answer


def claims_of(token: str) -> Mapping[str, Any]:
    """The claims of a JWT, which only the API can verify; empty for another text."""
    try:
        body = token.split(".")[1]
        return as_map(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
    except (ValueError, LookupError):
        return {}


def days_left(token: str, now: float) -> float | None:
    """Days until a JWT ends; None: it does not say, or its life is so short that something replaces it."""
    claims = claims_of(token)
    ends_at, made_at = claims.get("exp"), claims.get("iat")
    if not is_number(ends_at):
        return None
    left = (ends_at - now) / 86400
    life = (ends_at - made_at) / 86400 if is_number(made_at) else math.inf
    return left if life >= SHORT_DAYS or left < life / 10 else None


def _fetch(source: TokenSource, target: str) -> tuple[str, float]:
    """The token, and the seconds for which it may be kept."""
    try:
        match source.kind:
            case From.FILE:
                return _checked(_of_file(source.place), source), 0.0
            case From.VARIABLE:
                return _checked(os.environ.get(source.place, ""), source), 0.0
            case From.COMMAND:
                return _checked(_of_command(source, target), source), 0.0
            case From.SECRET:
                return _of_secret(source)
    except OSError as error:
        raise TokenUnavailable(f"no token from {source}: {error.strerror or type(error).__name__}") from None
    except ValueError as error:  # of a text that may be the secret
        raise TokenUnavailable(f"no token from {source}: it cannot be read ({type(error).__name__})") from None


def _of_file(path: str) -> str:
    with Path(path).open(encoding="utf-8") as file:
        return file.read(LARGEST + 1)


def _of_command(source: TokenSource, target: str) -> str:
    """What a command prints. It runs without a shell. Its errors are not shown: they may hold the token."""
    try:
        ran = subprocess.run(
            shlex.split(source.place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_S,
            env={**os.environ, TARGET_VARIABLE: target},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TokenUnavailable(f"no token from {source}: it did not end within {ASK_S:g} s") from None
    if ran.returncode:
        raise TokenUnavailable(f"no token from {source}: it ended with exit code {ran.returncode}")
    return ran.stdout[: LARGEST + 1].decode()


def _of_secret(source: TokenSource) -> tuple[str, float]:
    """The text of a secret; or, if it is a JSON object, its token, or one of the server that it names."""
    text = secret_text(source.place, region=source.region)
    if not text.lstrip().startswith("{"):
        return _checked(text, source), 0.0
    data = json.loads(text)
    if isinstance(token := data.get("token"), str):
        return _checked(token, source), 0.0
    if missing := [name for name in ("token_url", "client_id", "client_secret") if not isinstance(data.get(name), str)]:
        raise TokenUnavailable(
            f"no token from {source}: the secret is a JSON object with neither token nor {', '.join(missing)}"
        )
    return _of_server(source, data)


def secret_text(name: str, *, region: str | None = None, endpoint: str | None = None) -> str:
    """The present text of a secret.

    Args:
        name: its name or its ARN.
        region: AWS region; None: that of the ARN, else that of the environment.
        endpoint: of a local engine; None: AWS.

    Raises:
        ConfigurationError: there is no such secret, it is no text, or no region is known.
        ThunderAgentError: as `stores.aws.translate` says.
    """
    # boto3 is slow to import, and few canaries need it
    from botocore.exceptions import BotoCoreError, ClientError

    from thunderagent.stores.aws import build, code_of, translate

    where = region or (name.split(":")[3] if name.startswith("arn:") and name.count(":") >= 6 else None)
    try:
        found = build(lambda: _client(where, endpoint)).get_secret_value(SecretId=name)
    except (ClientError, BotoCoreError) as error:
        if code_of(error) == "ResourceNotFoundException":
            raise ConfigurationError(f"there is no secret {name} in this region") from error
        place, remedy = f"the secret {name}", "write secret:NAME?region=eu-central-1"
        permission = "secretsmanager:GetSecretValue"
        raise translate(error, "GetSecretValue", place, permission=permission, region=remedy) from error
    text = found.get("SecretString")
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"the secret {name} has no text: put one with aws secretsmanager put-secret-value")
    return text


def _client(region: str | None, endpoint: str | None) -> Any:
    from botocore.config import Config

    from thunderagent.stores.aws import is_loopback, new_session

    session = new_session(local=is_loopback(endpoint))
    config = Config(connect_timeout=1, read_timeout=2, retries={"mode": "standard", "total_max_attempts": 2})
    return session.client(
        "secretsmanager", region_name=region or session.region_name, endpoint_url=endpoint, config=config
    )


def _of_server(source: TokenSource, data: dict[str, Any]) -> tuple[str, float]:
    """A token by the grant "client credentials" of OAuth 2, from a server such as Amazon Cognito."""
    url = data["token_url"]
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise TokenUnavailable(f"no token from {source}: its token_url must begin with https://")
    more = {name: data[name] for name in ("scope", "audience") if isinstance(data.get(name), str)}
    asked = {"grant_type": "client_credentials", "client_id": data["client_id"], **more}
    body = urllib.parse.urlencode({**asked, "client_secret": data["client_secret"]}).encode()
    opener = urllib.request.build_opener(_NoRedirect())
    try:
        with opener.open(urllib.request.Request(url, body), timeout=ASK_S) as reply:  # noqa: S310 - checked above
            answer = json.loads(reply.read(LARGEST))
    except urllib.error.HTTPError as error:
        with error:
            raise TokenUnavailable(f"no token from {source}: {parts.hostname} answered {error.code}") from None
    except HTTPException as error:
        raise TokenUnavailable(f"no token from {source}: {parts.hostname} speaks no HTTP ({error!r:.100})") from None
    token, lasts_s = (answer.get("access_token"), answer.get("expires_in")) if isinstance(answer, dict) else (None, 0)
    if not isinstance(token, str):
        raise TokenUnavailable(f"no token from {source}: the answer of {parts.hostname} has no access_token")
    return _checked(token, source), float(lasts_s) if isinstance(lasts_s, (int, float)) else 0.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The client's secret goes only to the server that is named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _checked(text: str, source: TokenSource) -> str:
    """The token without white space around it, fit for a header."""
    token = text.strip()
    if not token:
        raise TokenUnavailable(f"no token from {source}: it is empty")
    if len(token) > LARGEST or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenUnavailable(f"no token from {source}: what is there is no token (a line of letters without spaces)")
    return token
