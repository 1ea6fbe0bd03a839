"""A global table of DynamoDB in this process: regions, lag, partitions, the loss of a region, clocks that are wrong.

Two modes, as DynamoDB has them. MREC: each region judges and answers its own writes, items go to the others later, and
of two writes of one item the later stays. MRSC: one order of all writes, every read sees them, a write that meets one
of another region has to be repeated, and a region that cannot reach a majority does nothing.
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
"""The third member of a strongly consistent table that has two regions; nobody reads or writes there."""

MOST_PENDING: Final = 100_000
OVERWRITTEN_KEPT: Final = 1_000
_LOOK_S: Final = 0.05
"""How often the thread looks when nothing wakes it, as the clock may be one that is set by hand."""
_JOIN_S: Final = 10.0


class _Sent(NamedTuple):
    due: float
    number: int
    at: float
    image: Image


def in_memory(region: str, clock: SharedClock) -> Engine:
    """The rows of a region in memory."""
    return SqliteEngine(MEMORY, clock=clock)


class GlobalTableSim:
    """Several regions with one table.

    `engine(region)` is a `port.Engine`: make a `TaskStore` of it, and agents and clients of that. With a `FakeClock`
    nothing is replicated before `deliver()` or `settle()`; in real time `start()` begins a thread that does so.

    Example:
        table = GlobalTableSim(["eu-central-1", "eu-west-1"], lag_s=0.5, clock=clock)
        store = TaskStore(table.engine("eu-west-1"), monotonic=clock.monotonic)
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
        """Make one.

        Args:
            regions: their names; of two writes at the same moment, that of the larger name stays.
            mode: `MREC` or `MRSC`.
            lag_s: seconds that an item takes to another region, or what says so for each item from the names of both.
                With `MRSC`: how long a write of one region is in the way of those of the others.
            clock: the true time; None: the clock of this machine.
            open_engine: the engine for the rows of a region, on the clock that it is given: `SqliteEngine` in memory
                unless you say otherwise, for example tables of a local DynamoDB. With `MRSC` there is one for all.
            most_pending: images of items on their way, over which writes are throttled.

        Raises:
            ConfigurationError: fewer than two regions, or another mode.
        """
        if len(set(regions)) < 2 or len(set(regions)) != len(regions):
            raise ConfigurationError(f"a global table has two regions or more, each with a name of its own: {regions}")
        if mode not in ("MREC", "MRSC"):
            raise ConfigurationError(f"a global table is MREC or MRSC, not {mode!r}")
        self.regions = tuple(regions)
        self.mode = mode
        self.lag_s = lag_s
        self.overwritten: deque[Overwritten] = deque(maxlen=OVERWRITTEN_KEPT)
        """Writes that were answered as done and are gone; the last 1,000."""
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
        """The table as one region has it."""
        self._known(region)
        return RegionEngine(self._replicas[region], region, self._for_engines)

    # What goes wrong

    def partition(self, one: str, other: str) -> None:
        """Nothing goes between two regions, in both directions; what is on its way waits."""
        self._known(one, other)
        with self._guard:
            self._cut.add(frozenset((one, other)))

    def heal(self, *pair: str) -> None:
        """The end of the partition of two regions, or of all partitions."""
        self._known(*pair)
        with self._guard:
            if pair:
                self._cut.discard(frozenset(pair))
            else:
                self._cut.clear()
        self._wake.set()

    def isolate(self, region: str) -> None:
        """A region is lost: its engine raises StoreUnavailable for everybody, and nothing goes there or leaves it.

        What it wrote before and did not get out arrives after `rejoin`.
        """
        self._known(region)
        with self._guard:
            self._isolated.add(region)

    def rejoin(self, region: str) -> None:
        """A region is back, with the rows that it had."""
        self._known(region)
        with self._guard:
            self._isolated.discard(region)
        self._wake.set()

    def skew(self, region: str, seconds: float) -> None:
        """Let the clock of a region be ahead by some seconds, or behind: of its agents, and of its writes."""
        self._known(region)
        self._skews[region] = seconds

    # Replication

    def deliver(self, now: float | None = None) -> int:
        """Take every image to its region that is due and whose way is free, in the order in which they are due.

        Args:
            now: on the true clock; None: its time.

        Returns:
            how many arrived.

        Raises:
            StoreError: the engine of a region did not take one; it stays on its way, with all that are behind it.
        """
        until = self._clock.now() if now is None else now
        with self._delivering:
            self._resolve()
            number = 0
            while (found := self._next(until)) is not None:
                link, sent = found
                overwritten = self._replicas[link[1]].receive(sent.image)
                with self._guard:  # not before it has arrived: whoever waits for the end of `pending` finds it there
                    self._links[link].remove(sent)
                    heapq.heapify(self._links[link])
                    if overwritten is not None:
                        self.overwritten.append(overwritten)
                number += 1
            self._tidy()
            return number

    def settle(self) -> int:
        """As `deliver`, and however long it would have taken: all replicas are equal then, if every way is free."""
        return self.deliver(math.inf)

    def pending(self) -> int:
        """Number of images that are on their way."""
        with self._guard:
            return sum(map(len, self._links.values()))

    def replication_lag(self, source: str, target: str) -> float:
        """Seconds since the oldest write of one region that has not arrived in the other; 0: everything has."""
        self._known(source, target)
        with self._guard:
            sent = self._links.get((source, target), ())
            return max((self._clock.now() - one.at for one in sent), default=0.0)

    # In real time

    def start(self) -> GlobalTableSim:
        """Let a thread deliver from now on, until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="global table", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """End the thread and close the engines of all regions.

        Raises:
            BaseException: what ended the thread before.
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
                with suppress(StoreUnavailable):  # of an engine that does not answer now; the image stays
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
        """Forget what is gone everywhere, once nothing is on its way that would bring it back."""
        replicas = self._replicas.values()
        if self.mode == "MREC" and any(replica.tombstones > TOMBSTONES_KEPT for replica in replicas):
            with ExitStack() as guards:
                for replica in replicas:
                    guards.enter_context(replica.guard)
                if not self.pending():
                    for replica in replicas:
                        replica.forget_tombstones()

    def _next(self, until: float) -> tuple[tuple[str, str], _Sent] | None:
        """The link whose way is free and whose first image is due, and due before those of the others."""
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
