"""The shared clock of all agents, whatever their hosts say.

Leases compare times that different hosts wrote, so those times must be on one clock. On one machine its clock says when
a task is due (`HostClock`), and leases count from its start (`BootClock`), which nobody can set. On DynamoDB both are
the service's time: each reply carries an HTTP `Date` in whole seconds, and `DateClock` intersects many bounds.

`now` is the best estimate, `earliest` and `latest` bound it. A holder writes its expiry from `latest`, an observer
judges it by `earliest`: the errors of both fall on the safe side.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from thunderagent.model.forks import renewed

DRIFT: Final = 1e-4
"""Drift of two quartz clocks per second, rounded up: 100 parts per million."""

SAME_PLACE_S: Final = 1.0
"""Two processes see the start of their machine within this time, unless its clock was set between their looks."""

_BOOT: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


def _shift() -> float:
    """Seconds that the time namespace of this process adds to CLOCK_BOOTTIME; containers of one machine may differ."""
    try:
        offsets = Path("/proc/self/timens_offsets").read_text(encoding="ascii").split()
        at = offsets.index("boottime")
        return int(offsets[at + 1]) + int(offsets[at + 2]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


_SHIFT: Final = _shift()


def since_boot() -> float:
    """Seconds since this machine started, its sleep included; nobody can set them.

    `time.monotonic` stands still in suspend and hibernation, so a lease counted on it would outlive its time. Only
    Linux
    has this clock (CLOCK_BOOTTIME); elsewhere the answer is `time.monotonic`. Neither counts while a hypervisor pauses.
    """
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT) - _SHIFT


@cache
def boot_id() -> str | None:
    """An id of this start of the machine; None where the system has none, or no clock that counts from it."""
    try:
        return None if _BOOT is None else Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def process_start(pid: int) -> str | None:
    """An id of this start of a process of this PID namespace; None: the process has ended, or the system has none.

    A host and a pid are not enough: a later process may have the pid, and each container has a process 1. The id is
    short because an agent's row is billed by the kilobyte.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        text = f"{boot_id()} {os.readlink('/proc/self/ns/pid')} {fields[19]}"
    except OSError:
        return None
    return None if fields[0] in "ZX" else hashlib.blake2s(text.encode(), digest_size=3).hexdigest()


class SharedClock(Protocol):
    """The clock of `lockTime` and `createdAt`."""

    def now(self) -> float:
        """Best estimate in epoch seconds."""

    def earliest(self) -> float:
        """A moment that is not later than the shared time."""

    def latest(self) -> float:
        """A moment that is not earlier than the shared time."""

    @property
    def is_usable(self) -> bool:
        """False while nothing is known of the shared time: then no lease may be judged."""

    @property
    def leases(self) -> SharedClock:
        """The clock of leases, turns and agents' rows; the same one where nobody can set it."""


def on_host(clock: SharedClock, at: float) -> float:
    """A time of `clock.leases` as `clock` has it, for people and for comparisons with due times."""
    return at if clock.leases is clock else at - clock.leases.now() + clock.now()


class BootClock:
    """The clock of leases on one machine: seconds since its start, added to a base in epoch seconds.

    All processes need the same base, which the first of them chooses and the store keeps. Until then a clock takes the
    one that it would choose.

    Args:
        boot_id: id of this start of the machine.
        boot: seconds since then.
        host: the clock of the machine, which may be set at any time.
    """

    is_usable = True

    def __init__(self, boot_id: str, boot: Callable[[], float], host: Callable[[], float]) -> None:
        self.boot_id = boot_id
        self._boot = boot
        self._host = host
        self._zero: float | None = None
        self.find: Callable[[], None] = lambda: None
        """Called before the clock chooses by itself: the store may know the base, and gives it to `place`."""
        self.is_placed = False
        """Whether the base is the one that the store keeps."""

    @property
    def zero(self) -> float:
        """The base: epoch seconds at which the machine started."""
        if self._zero is None:
            self.find()
        return self.choose()

    def choose(self) -> float:
        """The base, without a question to the store."""
        if self._zero is None:
            self._zero = self._host() - self._boot()
        return self._zero

    def place(self, zero: float) -> bool:
        """Take the base that the store keeps; False: times that this clock gave before are wrong."""
        is_same = self._zero is None or abs(self._zero - zero) < SAME_PLACE_S
        self._zero, self.is_placed = zero, True
        return is_same

    def now(self) -> float:
        return self._boot() + self.zero

    earliest = latest = now

    @property
    def leases(self) -> SharedClock:
        return self


class HostClock:
    """The clock of this machine, for a store that lives on it.

    Args:
        read: epoch seconds; they say when a task is due.
        boot: seconds since the machine started.
        boot_id: id of that start; None: leases count on epoch seconds too.
    """

    is_usable = True

    def __init__(
        self,
        read: Callable[[], float] = time.time,
        *,
        boot: Callable[[], float] = since_boot,
        boot_id: str | None = None,
    ) -> None:
        self._read = read
        self.leases: SharedClock = self if boot_id is None else BootClock(boot_id, boot, read)

    def now(self) -> float:
        return self._read()

    earliest = latest = now


class DateClock:
    """The clock of the service, learnt from the `Date` headers of its replies.

    A reply with `Date` D, sent at local time s and received at r, was made between D and D + 1 on the service's clock,
    so the offset of that clock to ours is between D - r and D + 1 - s. Bounds of many replies are intersected. They
    widen slowly with age, and a reply that contradicts them all (the service's clock was set) starts over.

    Args:
        monotonic: a clock that nobody can set, to which offsets are kept.
        host: the clock of this machine, for its `skew`.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = since_boot,
        host: Callable[[], float] = time.time,
    ) -> None:
        self.monotonic = monotonic
        self._host = host
        self._guard = renewed(threading.Lock())
        self._low: float | None = None
        self._high = 0.0
        self._at = 0.0

    def observe(self, date: str | None, *, sent: float, received: float) -> None:
        """Learn from one reply; `sent` and `received` are seconds of `monotonic`. A broken date is ignored."""
        try:
            second = parsedate_to_datetime(date or "").timestamp()
        except (TypeError, ValueError):
            return
        low, high = second - received, second + 1.0 - sent
        with self._guard:
            if self._low is not None:
                age = max(0.0, received - self._at) * DRIFT
                narrow = max(low, self._low - age), min(high, self._high + age)
                if narrow[0] <= narrow[1]:
                    low, high = narrow
            self._low, self._high, self._at = low, high, received

    @property
    def is_usable(self) -> bool:
        return self._low is not None

    def now(self) -> float:
        low, high = self._bounds()
        return (low + high) / 2

    def earliest(self) -> float:
        return self._bounds()[0]

    def latest(self) -> float:
        return self._bounds()[1]

    @property
    def leases(self) -> SharedClock:
        return self

    @property
    def skew(self) -> float:
        """Seconds by which the host's clock is ahead of the shared clock."""
        return self._host() - self.now()

    def _bounds(self) -> tuple[float, float]:
        with self._guard:
            if self._low is None:
                host = self._host()
                return host, host
            moment = self.monotonic()
            age = max(0.0, moment - self._at) * DRIFT
            return moment + self._low - age, moment + self._high + age


def at_text(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # a number made by hand
        return f"{at:g}"


def span_text(seconds: float) -> str:
    """The two largest units of a time: 45 s, 12 min, 2 h 5 min, 3 d 4 h."""
    left = max(0, round(seconds))
    for number, name, smaller, its_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= number:
            rest = left % number // smaller
            return f"{left // number} {name}" + (f" {rest} {its_name}" if rest else "")
    return f"{left} s"
