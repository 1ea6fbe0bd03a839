"""The wall clock of a time zone: from wall times to moments, and back.

Moments are whole epoch seconds. A wall time that comes twice, in autumn, means its first coming. One that does not come
at all, in spring, means the first moment after the gap.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

from thunderagent.model.errors import ConfigurationError

DAY_S: Final = 86400


@lru_cache(maxsize=256)
def zone_named(name: str) -> tzinfo:
    """The zone of a name such as `Europe/Berlin`.

    Raises:
        ConfigurationError: this machine does not know it; the message has similar names.
    """
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError, TypeError):
        known = sorted(available_timezones())
    if not known:
        raise ConfigurationError(f"the zone {name!r} is unknown, as this machine has no zones: pip install tzdata")
    folded = {one.casefold(): one for one in known} | {
        one.rpartition("/")[2].casefold(): one for one in known if "/" in one
    }
    wanted = str(name).casefold().replace(" ", "_")
    close = dict.fromkeys(folded[one] for one in difflib.get_close_matches(wanted, folded, n=3, cutoff=0.7))
    hint = f"; did you mean {' or '.join(close)}?" if close else "; write a name such as 'Europe/Berlin'"
    raise ConfigurationError(f"there is no time zone {name!r}{hint}")


def wall_time(moment: int, zone: tzinfo) -> datetime:
    """What the wall clock shows, without a zone."""
    return datetime.fromtimestamp(moment, zone).replace(tzinfo=None, fold=0)


def offset_s(moment: int, zone: tzinfo) -> int:
    """Seconds by which the wall clock is ahead of UTC."""
    return seconds_of(wall_time(moment, zone)) - moment


def seconds_of(naive: datetime) -> int:
    """Epoch seconds of a time without a zone, taken as UTC."""
    return int(naive.replace(tzinfo=UTC).timestamp())


def moment_of(naive: datetime, zone: tzinfo) -> int:
    """The first moment at which the wall clock shows this, or the first after the gap in which it lies."""
    first = int(naive.replace(tzinfo=zone, fold=0).timestamp())
    if wall_time(first, zone) == naive:
        return first
    before = int(naive.replace(tzinfo=zone, fold=1).timestamp())  # in a gap the later offset gives the earlier moment
    return _first(before, first, lambda moment: wall_time(moment, zone) > naive)


def next_turn(start: int, end: int, zone: tzinfo) -> int | None:
    """The first second after `start`, up to `end`, at which the wall clock has been put forward or back.

    Looks once a day: no zone has ever changed its clock twice in one.
    """
    before, last = offset_s(start, zone), start
    while last < end:
        day = min(end, (last // DAY_S + 1) * DAY_S)
        if offset_s(day, zone) != before:
            return _first(last, day, lambda moment: offset_s(moment, zone) != before)
        last = day
    return None


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first second after `low` from which on something holds; it does at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
