"""Lines in one file for each minute, every line exactly once: across restarts, takeovers, `kill -9` and late writers.

Three rules keep that:

* A line carries its own place in the stream, so the files themselves tell how far they are. A cursor that is saved
  elsewhere may be older than that and never newer, if `save` comes before it.
* `head.json` names the run that may write. A new run reads how far the files are and puts its name there under one
  lock of the folder, and each append looks there under that lock: from then on a late former run appends nothing.
* `head.json` also tells which file is written, how long it was at first, and the place before. What stands behind that
  was appended since; a crash leaves at most a torn last line there, and the next run cuts it off.

All runs need the same folder, on a file system with `flock`: a local one, or NFS of version 4.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from jobs.files import write_atomically
from thunderagent import Cursor, StreamContext
from thunderagent.model.errors import LeaseLost

HEAD: Final = "head.json"
LOCK_S: Final = 10.0
"""Longest wait for another run that has the lock, which it needs for a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Who writes, and where its first line goes."""

    run: tuple[float, int]
    """When the task was enqueued, and the fence: of a task that was deleted and enqueued again fences start afresh."""
    file: str | None = None
    size: int = 0
    """Bytes that were in the file before."""
    place: dict[str, Any] | None = None
    """Of the last line before these."""


class MinuteFiles:
    """The files of one stream. Use it in `async with`, which raises LeaseLost if a newer run writes here.

    Args:
        folder: for these files alone.
        ctx: of the run that writes.
    """

    def __init__(self, folder: Path, ctx: StreamContext) -> None:
        self._folder = folder
        self._run = (ctx.lease.task.submitted_at, ctx.fence)
        self._lock = self._file = -1
        self._name: str | None = None
        self.place: Cursor | None = None
        """Of the last line that is written; None if there is none yet."""

    async def append(self, line: str, place: Cursor, time: datetime) -> None:
        """Write a line of JSON, with the `seq` and the `epoch` of this place in it, into the file of its minute.

        Raises:
            LeaseLost: a newer run has begun; nothing was written.
            OSError: the disk does not take it. The run must end: part of the line may stand in the file.
            TimeoutError: another process holds the lock and does not go on.
        """
        async with self._alone():
            name = f"{time.astimezone(UTC):%Y-%m-%dT%H-%M}.jsonl"
            if name != self._name:
                self._turn_to(name)
            data = f"{line}\n".encode()
            while data:
                data = data[os.write(self._file, data) :]
            self.place = place

    async def save(self) -> None:
        """Wait until what was appended survives a power failure."""
        if self._file >= 0:
            await asyncio.to_thread(os.fdatasync, self._file)

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            async with self._alone() as head:
                if head is not None:
                    self._recover(head)
                self._turn_to(head.file if head else None)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._file = -1

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Head | None]:
        """Inside, no other run reads or writes here."""
        until = asyncio.get_running_loop().time() + LOCK_S
        while not _locked(self._lock):
            if asyncio.get_running_loop().time() > until:
                raise TimeoutError(f"{self._folder} is locked: a process that wrote here has been stopped; end it")
            await asyncio.sleep(0.01)  # no blocking wait: it would hold up all streams of the agent
        try:
            head = self._head()
            if head is not None and head.run > self._run:
                raise LeaseLost(f"a newer run writes into {self._folder}")
            yield head
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _head(self) -> Head | None:
        with suppress(FileNotFoundError):
            kept = json.loads((self._folder / HEAD).read_bytes())
            return Head(**kept | {"run": tuple(kept["run"])})
        return None

    def _recover(self, head: Head) -> None:
        """Find out how far the files are, and cut off a torn line."""
        self.place = Cursor.from_map(head.place)
        path = self._folder / head.file if head.file else None
        if path is not None and path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(path, whole)
            if whole > head.size:
                last = json.loads(content[:whole].splitlines()[-1])
                self.place = Cursor(last["seq"], last["epoch"])

    def _turn_to(self, name: str | None) -> None:
        """Write into this file from now on. Everything before is on the disk when the head says so."""
        before, size = self._file, 0
        if name is not None:
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._file).st_size
        if before >= 0:
            try:
                os.fdatasync(before)
            finally:
                os.close(before)
        head = Head(run=self._run, file=name, size=size, place=self.place.to_map() if self.place else None)
        write_atomically(self._folder / HEAD, json.dumps(asdict(head)))
        self._name = name


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
