"""Hides secrets in what is logged: values of facts by their names, and what looks like a secret inside texts.

A text is searched only when it has something that every shape of a secret has; most have not, and cost nothing. Too
much is hidden rather than too little: all that follows `token=`, up to the next space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "***"

SECRET_NAMES: Final = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "authorization",
    "api_key",
    "api-key",
    "apikey",
    "cookie",
    "credential",
    "private_key",
    "private-key",
    "x-amz-signature",
)
"""A fact whose name contains one of these, in any case, is hidden."""

_KEY_ID: Final = r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
_USER: Final = r"(?<=://)[^\s/?#\"'<>]+(?=@)"
_BEARER: Final = r"(?i:(?<=bearer )|(?<=bearer\t))[^\s\"'\x1b]+"


class Redactor:
    """Hides secrets.

    Args:
        names: further names of facts to hide, with commas between.
    """

    def __init__(self, names: str = "") -> None:
        more = tuple(name.strip().lower() for name in names.split(",") if name.strip())
        self._names = (*SECRET_NAMES, *more)
        self._known: dict[str, bool] = {}
        words = "|".join(re.escape(name) for name in self._names)
        # A name, = or :, and a value: the rest of the line for a header; else a quoted text to its quote, or to the end
        # if that was cut off; or something in brackets; or all to the next space. Repetition in a name is bounded, so
        # that no text takes longer than its length.
        mark = r"[\w.\-]{0,64}\\{0,8}[\"']?\]?[ \t]{0,8}[=:][ \t]{0,8}+"
        self._pattern = re.compile(
            rf"(?P<header>(?i:authorization|cookie){mark})(?!\\)[^\r\n\"'\x1b]+"
            rf"|(?P<name>(?i:{words}){mark})"
            r"(?:b?(?P<quote>\\{0,8}[\"']).*?(?:(?<!\\)(?P=quote)|\Z)"
            r"|[\[({][^\])}\x1b]*[^\s&\x1b]*"
            r"|[^\s&\x1b]+)"
            rf"|{_KEY_ID}|{_USER}|{_BEARER}",
            re.DOTALL,
        )

    def hides(self, name: str) -> bool:
        """Whether the value of a fact with this name is a secret."""
        known = self._known.get(name)
        if known is None:
            low = name.lower()
            known = any(one in low for one in self._names)
            if len(self._known) < _MOST_NAMES:
                self._known[name] = known
        return known

    def text(self, text: str) -> str:
        if "=" in text or ":" in text:
            low = text.lower()
            for name in self._names:
                if name in low:
                    return self._pattern.sub(_replaced, text)
            if "@" in text and "://" in text:
                return self._pattern.sub(_replaced, text)
        if "earer" in text or "EARER" in text or "AKIA" in text or "ASIA" in text:
            return self._pattern.sub(_replaced, text)
        return text

    def value(self, name: str, value: Any) -> Any:
        """The value of a fact as it may be shown."""
        is_hidden = self._known.get(name)
        if is_hidden is None:
            is_hidden = self.hides(name)
        if is_hidden and value is not None:
            return HIDDEN
        kind = type(value)
        if kind is str:
            return self.text(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Mapping):
            return {key: self.value(str(key), one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            shown = [self.value("", one) for one in value]
            return shown if isinstance(value, list) else tuple(shown)
        if isinstance(value, (int, float)):
            return value
        return self.text(str(value))


_MOST_NAMES: Final = 1000
_PLAIN: Final = frozenset({int, float, bool, type(None)})


def _replaced(found: re.Match[str]) -> str:
    return (found["header"] or found["name"] or "") + HIDDEN
