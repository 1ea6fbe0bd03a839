"""Names as they stand in the table: of jobs with their versions, and keys.

The attribute `job` is the name of the job for version 1, and `name@2` from then on. An agent that does not know the
version, whatever its own age, reads past the task as past a job that it does not have.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from thunderagent.model.arguments import is_storable, shown
from thunderagent.model.errors import ConfigurationError

NEWEST: Final = 999_999

LONGEST_KEY: Final = 256

_OF_A_VERSION: Final = re.compile(r"(.+)@([2-9]|[1-9][0-9]{1,5})", re.DOTALL)
_LIKE_A_VERSION: Final = re.compile(r"(.*)@([0-9]+)", re.DOTALL)


def job_value(name: str, version: int) -> str:
    """The attribute `job` of a task: the name of its job, with the version unless that is 1."""
    return name if version == 1 else f"{name}@{version}"


def parse_job(value: str) -> tuple[str, int]:
    found = _OF_A_VERSION.fullmatch(value)
    return (found[1], int(found[2])) if found else (value, 1)


def plain_job(value: str) -> str:
    return parse_job(value)[0] if "@" in value else value


def wanted_job(text: str) -> tuple[str, int]:
    """Name and version of a job that a caller names: `report.build`, or `report.build@2`.

    Raises:
        ConfigurationError: the text ends like a version, and is none.
    """
    found = _LIKE_A_VERSION.fullmatch(text)
    if found is None:
        return text, 1
    name, digits = found[1], found[2]
    if not name or digits[0] == "0" or len(digits) > len(str(NEWEST)) or has_version(name):
        raise ConfigurationError(f"{text[:200]!r} is no job of a version: write name@2, with a version up to {NEWEST}")
    return name, int(digits)


def has_version(name: str) -> bool:
    """Whether a text ends like the version of a job, as no name of a job may."""
    return _LIKE_A_VERSION.fullmatch(name) is not None


def job_name_problem(name: object) -> str | None:
    """The problem of a job's name without its version, or None."""
    if isinstance(name, str) and 1 <= len(name) <= 128 and is_storable(name) and not re.search(r"\s", name):
        return None
    return f"the name {shown(name)} of a job must have 1 to 128 characters and no space"


def key_problem(name: str, value: object) -> str | None:
    """The problem of a text for a unique key or the key of a limit, or None."""
    if not isinstance(value, str):
        return f"{name} is {shown(value)}; use a text"
    size = len(value.encode(errors="replace"))
    if 1 <= size <= LONGEST_KEY and value.isprintable():
        return None
    return f"{name} is {value[:80]!r} with {size} bytes; use 1 to {LONGEST_KEY} bytes of printable text"


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` with known names that resemble this one, or an empty text."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def names_of(agent: str) -> tuple[str, str]:
    """The names under which an agent can be paused: its own, and its host's."""
    return agent, agent.partition(":")[0]
