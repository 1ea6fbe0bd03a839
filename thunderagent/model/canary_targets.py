"""The settings of a canary: its targets, and where its token comes from. Texts are checked, nothing is opened."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from thunderagent.model.errors import ConfigurationError

QUEUE: Final = "queue"
"""The target that every canary has: a task that is put, run and done. No other may have this name."""

MOST_TARGETS: Final = 10
"""Each agent connects to each of them every half minute, and each is a metric of its own."""

TARGET: Final = "{target}"
"""In the source of a token: the name of the target."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_EXAMPLE: Final = "file:///run/thunderagent/canary.jwt, env:CANARY_TOKEN, command:/opt/canary-token, secret:NAME"


class From(StrEnum):
    FILE = "file"
    VARIABLE = "env"
    COMMAND = "command"
    SECRET = "secret"  # noqa: S105 - a scheme


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where a token comes from: a path, a variable, a command or a secret."""

    kind: From
    place: str
    region: str | None = None
    """Of a secret; None: that of its ARN, else of the environment."""

    @classmethod
    def parse(cls, text: str, target: str = TARGET) -> TokenSource:
        """The source that a text names, for one target.

        Raises:
            ConfigurationError: the text names none.
        """
        scheme, colon, rest = text.partition(":")
        if not colon or scheme not in set(From):
            raise ConfigurationError(f"begins with none of {', '.join(f'{one}:' for one in From)}; write {_EXAMPLE}")
        kind, region = From(scheme), None
        rest = rest.strip()
        if kind is From.FILE:
            rest = rest.removeprefix("//")
        elif kind is From.SECRET:
            rest, _, query = rest.removeprefix("//").partition("?")
            region = dict(parse_qsl(query)).get("region")
        if not rest or (kind is From.VARIABLE and not _VARIABLE.fullmatch(rest)):
            raise ConfigurationError(f"names no {kind.name.lower()} behind {scheme}:; write {_EXAMPLE}")
        return cls(kind, rest.replace(TARGET, target), region)

    def __str__(self) -> str:
        """For messages; of a command the first word, as others may be secrets."""
        place = (
            self.place.split(maxsplit=1)[0] + " …" * (" " in self.place) if self.kind is From.COMMAND else self.place
        )
        return f"{self.kind}:{place}"


def canary_problems(targets: Mapping[str, str], token_from: str | None, prefix: str) -> Iterator[str]:
    """Problems of the settings, each with its variable."""
    yield from (f"{prefix}CANARY_TARGETS {problem}" for problem in target_problems(targets))
    if token_from is not None:
        try:
            TokenSource.parse(token_from)
        except ConfigurationError as error:
            yield f"{prefix}CANARY_TOKEN_FROM {error}"


def target_problems(targets: Mapping[str, str]) -> Iterator[str]:
    """Names that no metric takes, and URLs that are none or hold a secret."""
    if len(targets) > MOST_TARGETS:
        yield f"has {len(targets)} targets; use at most {MOST_TARGETS}"
    for name, url in targets.items():
        if not _NAME.fullmatch(name) or name == QUEUE:
            yield (
                f"names a target {name!r:.80}; use a region, such as eu-central-1, or 1 to 64 letters, digits and "
                f". _ -, but not {QUEUE!r}"
            )
        try:
            parts = urlsplit(url)
            is_wrong = parts.scheme not in ("ws", "wss") or not parts.hostname or (parts.port or 1) < 1
        except ValueError:
            is_wrong = True
        if is_wrong:
            yield f"gives {name!r:.80} no URL of a WebSocket; write for example wss://ws.example.com/prod"
        elif "@" in parts.netloc or parts.query or parts.fragment:
            yield (
                f"gives {name!r:.80} a URL with a user, a query or a fragment, where secrets are logged: a canary "
                "sends its token in a header"
            )


def is_region(target: str) -> bool:
    """Whether a target has the name of an AWS region: then that region, and no other, must answer."""
    return _REGION.fullmatch(target) is not None
