"""The trace of a task, as a W3C `traceparent`: read, checked, and known to what runs inside.

`00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01`: version, trace, span, flags. A text that is none is no error:
its task goes on without a trace. Nothing here needs OpenTelemetry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_SHAPE: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_XRAY: Final = re.compile(r"1-([0-9a-f]{8})-([0-9a-f]{24})", re.ASCII)
_SPAN: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LONGEST: Final = 512
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16

CURRENT: Final[ContextVar[str | None]] = ContextVar("traceparent", default=None)
"""The trace of the run or the request that this thread or coroutine works for."""


def checked(text: object) -> str | None:
    """A `traceparent` in the form of version 00, or None when the text is none.

    As W3C asks: hexadecimal in small letters, neither trace nor span all zero, version not ff; of a later version, what
    this one knows.
    """
    if not isinstance(text, str) or len(text) > _LONGEST or not (found := _SHAPE.fullmatch(text.strip())):
        return None
    version, trace, span, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or trace == _NO_TRACE or span == _NO_SPAN:
        return None
    return f"00-{trace}-{span}-{flags if version == '00' else _sampled(int(flags, 16) & 1)}"


def from_xray(text: object) -> str | None:
    """The `traceparent` of a header of AWS X-Ray (`Root=1-…;Parent=…;Sampled=1`), or None when it names no span."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        return None
    parts = dict(part.strip().partition("=")[::2] for part in text.split(";"))
    root, parent = _XRAY.fullmatch(parts.get("Root", "")), parts.get("Parent", "")
    if root is None or not _SPAN.fullmatch(parent):
        return None
    return checked(f"00-{root[1]}{root[2]}-{parent}-{_sampled(parts.get('Sampled') == '1')}")


def trace_id(text: str | None) -> str | None:
    """The trace of a `traceparent`, or None."""
    return None if (text := checked(text)) is None else text[3:35]


@contextmanager
def continuing(text: str | None) -> Iterator[None]:
    """What is enqueued inside, in this thread or coroutine, belongs to this trace; None changes nothing."""
    if text is None:
        yield
        return
    token = CURRENT.set(text)
    try:
        yield
    finally:
        CURRENT.reset(token)


def _sampled(wanted: bool | int) -> str:
    return "01" if wanted else "00"
