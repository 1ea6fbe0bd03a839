"""Writes the lines of an agent's events past the machinery of the logger, which costs more than the line itself.

Only while nothing differs: as soon as the application has added a sink, a patcher, facts or a filter to the logger, or
a context is bound, its lines are the logger's business again. The text is the same either way.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final, TextIO

Fact = tuple[str, Any]

_encode: Final = json.JSONEncoder(default=str, ensure_ascii=False).encode
_escape: Final[Callable[[str], str]] = json.encoder.encode_basestring


def utc(at: datetime) -> str:
    """As `2026-07-14T07:30:00.250000Z`: the same moment is the same text on every host, whatever `TZ` says."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Stamps:
    """The time for lines as `utc` tells it; what does not change within a second is made once."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._known = (-1, "")

    def iso(self) -> str:
        """The time now."""
        now = self._now()
        second = int(now)
        known, head = self._known
        if known != second:
            head = utc(datetime.fromtimestamp(second, UTC))[:19]
            self._known = (second, head)
        return f"{head}.{int((now - second) * 1e6):06d}Z"


class LogWriter:
    """One stream of lines, written whole. Safe in threads.

    Args:
        logger: that of loguru, set up for this stream. What is private to it is only looked at, and where that is not
            found, nothing is written here.
        stream: where they go.
        guard: held while a line is written; also by whoever else writes to the stream.
        as_json: a JSON object a line, else text.
        plain: how text shows a value.
        now: epoch seconds.
    """

    def __init__(
        self,
        logger: Any,
        stream: TextIO,
        guard: threading.Lock,
        *,
        as_json: bool,
        plain: Callable[[Any], str],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._stream = stream
        self._guard = guard
        self.line: Callable[[str, str, Iterable[Fact]], str] = self._json if as_json else self._text
        """Makes a line of a level, a message and facts."""
        self._plain = plain
        self._stamps = Stamps(now)
        core: Any = getattr(logger, "_core", None)
        self._core = core
        self._context: Any = getattr(sys.modules[type(logger).__module__], "context", None)
        self._handlers, self._patcher, self._filters = (
            getattr(core, name, None) for name in ("handlers", "patcher", "activation_list")
        )
        colours = [getattr(one, "_colorize", True) for one in (self._handlers or {}).values()]
        self._is_usable = colours == [False] and self._context is not None and hasattr(core, "extra")

    @property
    def may_write(self) -> bool:
        """False once the logger is not as it was when this was made, or a context is bound."""
        return (
            self._is_usable
            and self._core.handlers is self._handlers  # it replaces its tables when they change
            and self._core.patcher is self._patcher
            and self._core.activation_list is self._filters
            and not self._core.extra
            and not self._context.get()
        )

    def write(self, lines: Iterable[tuple[str, str, Iterable[Fact]]]) -> None:
        """Write lines, each of a level, a message and facts, at once; the caller leaves out facts that are None."""
        text = "".join([self.line(*line) for line in lines])
        if text:
            with self._guard:
                self._stream.write(text)
                self._stream.flush()

    def _json(self, level: str, message: str, facts: Iterable[Fact]) -> str:
        parts = [f'{{"time": "{self._stamps.iso()}", "level": "{level}", "message": {_escape(message)}']
        for name, value in facts:
            kind = type(value)
            if kind is str:
                parts.append(f', "{name}": {_escape(value)}')
            elif kind is int or (kind is float and value - value == 0):  # JSON has other words for those without end
                parts.append(f', "{name}": {value!r}')
            else:
                parts.append(f', "{name}": {_encode(value)}')
        parts.append("}\n")
        return "".join(parts)

    def _text(self, level: str, message: str, facts: Iterable[Fact]) -> str:
        at, plain = self._stamps.iso().replace("T", " ", 1)[:23], self._plain
        shown = " ".join([f"{name}={plain(value)}" for name, value in facts])
        return f"{at}Z {level: <7} {message} {shown}\n"
