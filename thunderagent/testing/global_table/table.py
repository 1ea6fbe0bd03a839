"""A global table of DynamoDB in this process: regions, lag, partitions, lost regions, wrong clocks.

MREC: each region judges and answers its own writes, items go to the others later, and of two writes of one item the
later stays. MRSC: all writes have one order and every read sees them. A write that meets one of another region must be
repeated, and a region without a majority does nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Final, Literal, NamedTuple

from thunderagent.model.clock import HostClock, SharedClock
from thunderagent.model.errors import ConfigurationError, StoreError, StoreThrottled, StoreUnavailable
from thunderagent.model.task import Row
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing.global_table.engine import Links, RegionClock, RegionEngine
from thunderagent.testing.global_table.replica import TOMBSTONES_KEPT, Image, Overwritten, Replica

Mode = Literal["MREC", "MRSC"]
Lag = float | Callable[[str, str], float]

WITNESS: Final = "witness"
"""Third member of a strongly consistent table with two regions; it serves no reads or writes."""

MOST_PENDING: Final = 100_000
OVERWRITTEN_KEPT: Final = 1_000
_LOOK_S: Final = 0.05
"""Seconds between two looks of the thread: a clock set by hand wakes nothing."""
_JOIN_S: Final = 10.0


class _Sent(NamedTuple):
    due: float
    number: int
    at: float
    image: Image


def in_memory(region: str, clock: SharedClock) -> Engine:
    return SqliteEngine(MEMORY, clock=clock)


class GlobalTableSim:
    """Several regions with one table.

    `engine(region)` is an `Engine`: make a `TaskStore` of it, and agents and clients of that. With a `FakeClock`
    nothing is replicated before `deliver()` or `settle()`; in real time the thread of `start()` does that.

    Example:
        table = GlobalTableSim(["eu-central-1", "eu-west-1"], lag_s=0.5, clock=clock)
        store = TaskStore(table.engine("eu-west-1"), monotonic=clock.monotonic)

    Args:
        regions: their names; of two writes at one moment, that of the larger name stays.
        lag_s: seconds that an item takes to another region, or a function of both names. With `MRSC`: seconds in
            which a write of one region excludes those of the others.
        clock: the true time; None: the clock of this machine.
        open_engine: makes the engine for the rows of a region on the given clock, for example tables of a local
            DynamoDB. With `MRSC` there is one engine for all.
        most_pending: images on their way above which writes are throttled.

    Raises:
        ConfigurationError: fewer than two regions, or another mode.
    """

    def __init__(
        self,
        regions: Sequence[str],
        *,
        mode: Mode = "MREC",
        lag_s: Lag = 1.0,
        clock: SharedClock | None = None,
        open_engine: Callable[[str, SharedClock], Engine] = in_memory,
        most_pending: int = MOST_PENDING,
    ) -> None:
        if len(set(regions)) < 2 or len(set(regions)) != len(regions):
            raise ConfigurationError(f"a global table has two regions or more, each with a name of its own: {regions}")
        if mode not in ("MREC", "MRSC"):
            raise ConfigurationError(f"a global table is MREC or MRSC, not {mode!r}")
        self.regions = tuple(regions)
        self.mode = mode
        self.lag_s = lag_s
        self.overwritten: deque[Overwritten] = deque(maxlen=OVERWRITTEN_KEPT)
        """The last 1,000 writes that were answered as done and are lost."""
        self._clock = clock or HostClock()
        self._skews = dict.fromkeys(regions, 0.0)
        self._most_pending = most_pending
        if mode == "MRSC":
            whole = Replica(regions[0], open_engine(regions[0], self._clock))
            self._replicas = dict.fromkeys(regions, whole)
        else:
            self._replicas = {region: Replica(region, open_engine(region, self._clock)) for region in regions}
        self._guard = threading.RLock()
        self._delivering = threading.RLock()
        self._wake = threading.Event()
        self._numbers = itertools.count()
        self._links: dict[tuple[str, str], list[_Sent]] = {
            pair: [] for pair in (itertools.permutations(regions, 2) if mode == "MREC" else ())
        }
        self._cut: set[frozenset[str]] = set()
        self._isolated: set[str] = set()
        self._last: dict[str, tuple[str, float]] = {}
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._failure: BaseException | None = None
        self._for_engines = Links(self._check, self._refusal, self._note, self._clock_of, expires=mode == "MREC")

    def engine(self, region: str) -> RegionEngine:
        self._known(region)
        return RegionEngine(self._replicas[region], region, self._for_engines)

    # What goes wrong

    def partition(self, one: str, other: str) -> None:
        """Cut the link of two regions, in both directions; images on their way wait."""
        self._known(one, other)
        with self._guard:
            self._cut.add(frozenset((one, other)))

    def heal(self, *pair: str) -> None:
        """End the partition of two regions, or all partitions."""
        self._known(*pair)
        with self._guard:
            if pair:
                self._cut.discard(frozenset(pair))
            else:
                self._cut.clear()
        self._wake.set()

    def isolate(self, region: str) -> None:
        """Lose a region: its engine raises StoreUnavailable, and no image enters or leaves it before `rejoin`."""
        self._known(region)
        with self._guard:
            self._isolated.add(region)

    def rejoin(self, region: str) -> None:
        """Bring a region back with the rows that it had."""
        self._known(region)
        with self._guard:
            self._isolated.discard(region)
        self._wake.set()

    def skew(self, region: str, seconds: float) -> None:
        """Set the clock of a region's agents and writes ahead by some seconds, or behind."""
        self._known(region)
        self._skews[region] = seconds

    # Replication

    def deliver(self, now: float | None = None) -> int:
        """Deliver every due image whose link is free, in the order of their due times.

        Args:
            now: on the true clock; None: its time.

        Returns:
            how many arrived.

        Raises:
            StoreError: the engine of a region did not take one; it stays on its way, with all behind it.
        """
        until = self._clock.now() if now is None else now
        with self._delivering:
            self._resolve()
            number = 0
            while (found := self._next(until)) is not None:
                link, sent = found
                overwritten = self._replicas[link[1]].receive(sent.image)
                with self._guard:  # after it has arrived: when `pending` is 0, all items are there
                    self._links[link].remove(sent)
                    heapq.heapify(self._links[link])
                    if overwritten is not None:
                        self.overwritten.append(overwritten)
                number += 1
            self._tidy()
            return number

    def settle(self) -> int:
        """Deliver all images, due or not: all replicas are equal then, if every link is free."""
        return self.deliver(math.inf)

    def pending(self) -> int:
        with self._guard:
            return sum(map(len, self._links.values()))

    def replication_lag(self, source: str, target: str) -> float:
        """Age in seconds of the oldest write of one region that has not arrived in the other; 0: none."""
        self._known(source, target)
        with self._guard:
            sent = self._links.get((source, target), ())
            return max((self._clock.now() - one.at for one in sent), default=0.0)

    # In real time

    def start(self) -> GlobalTableSim:
        """Start a thread that delivers until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="global table", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """End the thread and close the engines of all regions.

        Raises:
            BaseException: the error that ended the thread.
        """
        self._ends.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        for replica in set(self._replicas.values()):
            replica.engine.close()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> GlobalTableSim:
        return self

    def __exit__(self, *of_error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                with suppress(StoreUnavailable):  # the engine does not answer; the image stays
                    self.deliver()
                self._wake.wait(_LOOK_S)
                self._wake.clear()
        except BaseException as error:
            self._failure = error

    # For the engines of the regions

    def _clock_of(self, region: str, clock: SharedClock) -> SharedClock:
        return RegionClock(clock, self._skews[region]) if self._skews[region] else clock

    def _check(self, region: str) -> None:
        with self._guard:
            if self._failure is not None:
                raise StoreError(f"the replication of the simulated table has ended: {self._failure!r}")
            if region in self._isolated or not self._has_majority(region):
                raise StoreUnavailable(f"the region {region!r} of the simulated table does not answer: rejoin or heal")

    def _refusal(self, region: str, item_id: str) -> StoreError | None:
        with self._guard:
            if self.mode == "MREC":
                if self.pending() < self._most_pending:
                    return None
                return StoreThrottled(f"{self._most_pending} items wait for their replication: heal or deliver")
            writer, at = self._last.get(item_id, (region, -math.inf))
            if writer == region or self._clock.now() >= at + self._lag(writer, region):
                return None
            return StoreUnavailable(f"ReplicatedWriteConflictException: {writer} is writing {item_id} too: try again")

    def _note(self, region: str, item_id: str, row: Row | None, text: tuple[str, float] | None) -> None:
        now = self._clock.now()
        if self.mode == "MRSC":
            with self._guard:
                self._last[item_id] = region, now
            return
        self._send(self._replicas[region].note(item_id, row, at=now + self._skews[region], text=text), region, now)

    def _send(self, image: Image, region: str, now: float) -> None:
        with self._guard:
            for (source, target), sent in self._links.items():
                if source == region:
                    due = now + self._lag(source, target)
                    heapq.heappush(sent, _Sent(due, next(self._numbers), now, image))
        self._wake.set()

    def _resolve(self) -> None:
        if self.mode == "MREC":
            for region, replica in self._replicas.items():
                with replica.guard:
                    now = self._clock.now()
                    for image in replica.resolve(now + self._skews[region]):
                        self._send(image, region, now)

    def _tidy(self) -> None:
        """Forget deleted items once no image is on its way that would bring them back."""
        replicas = self._replicas.values()
        if self.mode == "MREC" and any(replica.tombstones > TOMBSTONES_KEPT for replica in replicas):
            with ExitStack() as guards:
                for replica in replicas:
                    guards.enter_context(replica.guard)
                if not self.pending():
                    for replica in replicas:
                        replica.forget_tombstones()

    def _next(self, until: float) -> tuple[tuple[str, str], _Sent] | None:
        """The free link with the earliest due image."""
        with self._guard:
            due = [
                (link, sent[0])
                for link, sent in self._links.items()
                if sent and sent[0].due <= until and self._is_free(link)
            ]
            return min(due, key=lambda one: one[1][:2], default=None)

    def _is_free(self, link: tuple[str, str]) -> bool:
        return frozenset(link) not in self._cut and not self._isolated.intersection(link)

    def _has_majority(self, region: str) -> bool:
        if self.mode == "MREC":
            return True
        members = [*self.regions, WITNESS][: len(self.regions) | 1]
        reached = [one for one in members if one == region or self._is_free((region, one))]
        return 2 * len(reached) > len(members)

    def _lag(self, source: str, target: str) -> float:
        return self.lag_s(source, target) if callable(self.lag_s) else self.lag_s

    def _known(self, *regions: str) -> None:
        for region in regions:
            if region not in self.regions:
                raise ConfigurationError(f"the table has no region {region!r}, but {', '.join(self.regions)}")
