"""Peers for streams of real agents: chaos servers in a thread of the test, and what handlers have written."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from thunderagent.testing.chaos import Behaviour, ChaosServer

T = TypeVar("T")

CALL_S: Final = 10.0


class Feeds:
    """Chaos servers on one event loop, in a thread; use it with `feeds()`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[ChaosServer] = []
        self._publishers: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="feeds")
        self._thread.start()

    def open(self, *behaviours: Behaviour, rate: float = 0.0, **options: Any) -> ChaosServer:
        """A server; its arguments, and messages that it publishes in a second.

        Its lists and numbers may be read from here; everything else is done by `call`.
        """

        async def begin() -> ChaosServer:
            server = ChaosServer(*behaviours, from_start=True, **options)
            self._servers.append(await server.__aenter__())
            if rate:
                self._publishers.append(asyncio.create_task(_publish(server, rate)))
            return server

        return asyncio.run_coroutine_threadsafe(begin(), self._loop).result(CALL_S)

    def call(self, do: Callable[[], T]) -> T:
        """Do something with a server, in its thread."""

        async def run() -> T:
            return do()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_S)

    def be_quiet(self) -> None:
        """Publish nothing more."""
        self.call(lambda: [publisher.cancel() for publisher in self._publishers])

    def close(self) -> None:
        """Reset all connections and end the thread.

        Raises:
            ExceptionGroup: a server failed while it served.
        """

        async def end() -> None:
            for publisher in self._publishers:
                publisher.cancel()
            for server in self._servers:
                await server.__aexit__()

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(CALL_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_S)
            self._loop.close()


async def _publish(server: ChaosServer, rate: float) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    published = 0
    while True:
        await asyncio.sleep(1.0 / rate)
        due = int((loop.time() - start) * rate)
        server.publish_many(due - published)
        published = due


@contextmanager
def feeds() -> Iterator[Feeds]:
    """Servers that are gone afterwards."""
    running = Feeds()
    try:
        yield running
    finally:
        running.close()


@contextmanager
def full_port() -> Iterator[int]:
    """A port on 127.0.0.1 that takes no more connections and refuses none: whoever connects waits for an answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fillers: list[socket.socket] = []
        try:
            while True:
                fillers.append(socket.socket())
                fillers[-1].settimeout(0.2)
                try:
                    fillers[-1].connect(address)
                except TimeoutError:
                    break
            yield int(address[1])
        finally:
            for filler in fillers:
                filler.close()


@contextmanager
def closed_port() -> Iterator[int]:
    """A port on 127.0.0.1 that refuses connections, and stays ours."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Handled:
    """One line of a handler."""

    fence: int
    epoch: str
    seq: int
    handed_at: float
    """When the handler was given the message, in epoch seconds."""
    pid: int


class Story:
    """What was handled of each stream so far, in order."""

    def __init__(self, folder: Path, streams: Sequence[str]) -> None:
        self._folder = folder
        self._read = dict.fromkeys(streams, 0)
        self._lines: dict[str, list[Handled]] = {name: [] for name in streams}

    def __getitem__(self, stream: str) -> Sequence[Handled]:
        """All lines of a stream."""
        self._take(stream)
        return self._lines[stream]

    def last(self, stream: str) -> Handled | None:
        """The last line."""
        lines = self[stream]
        return lines[-1] if lines else None

    def first_after(self, stream: str, fence: int) -> Handled | None:
        """The first line with a greater fence."""
        return next((line for line in self[stream] if line.fence > fence), None)

    def repeats(self, stream: str) -> list[Handled]:
        """Messages that had been handled before."""
        seen: set[tuple[str, int]] = set()
        found = []
        for line in self[stream]:
            if (line.epoch, line.seq) in seen:
                found.append(line)
            seen.add((line.epoch, line.seq))
        return found

    def gaps(self, stream: str) -> list[tuple[int, int]]:
        """Jumps in the numbers, repeats left out; the first message is number 1."""
        numbers = [0, *dict.fromkeys(line.seq for line in self[stream])]
        return [(before, after) for before, after in pairwise(numbers) if after != before + 1]

    def fences_in_order(self, stream: str) -> bool:
        """True when no run has handled anything after the first message of a later run."""
        return all(before.fence <= after.fence for before, after in pairwise(self[stream]))

    def longest_pause(self, stream: str, since: float) -> float:
        """Seconds between two messages, after this moment."""
        times = [line.handed_at for line in self[stream] if line.handed_at >= since]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def _take(self, stream: str) -> None:
        path, begin = self._folder / f"{stream}.lines", self._read[stream]
        if not path.exists() or path.stat().st_size == begin:
            return
        with path.open("rb") as file:
            file.seek(begin)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[stream] += len(whole)
        for line in whole.decode().splitlines():
            fence, epoch, seq, handed_at, pid = line.split()
            self._lines[stream].append(Handled(int(fence), epoch, int(seq), float(handed_at), int(pid)))
