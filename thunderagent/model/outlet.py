"""Text streams whose writers never wait for a reader.

A pipe that nobody reads is full after 64 KiB, and the next write to it waits for ever: the loop, a heartbeat, a handler
or the end of the process. Here a line that the reader does not take at once waits in a bounded queue. Lines for which
there is no room are dropped and counted.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, TextIO
from weakref import WeakKeyDictionary

LINES_END_S: Final = 1.0
"""How long a process that ends waits for a reader to take its last lines."""

LINES_LOOK_S: Final = 0.01
"""Time between two looks whether it has."""


MOST_WAITING: Final = 1 << 20
"""Bytes that wait for a reader; further lines are dropped and counted."""
_EACH: Final = 100
"""Bytes that a waiting piece of text takes beside its own."""
_END: Final = b""
"""Asks the thread to close its file."""

_known: WeakKeyDictionary[TextIO, TextIO] = WeakKeyDictionary()
"""Streams and the ones made of them."""


def said(number: int) -> str:
    """The line in place of dropped lines."""
    return f"thunderagent: {number} lines were dropped here, which nobody took in time\n"


class Outlet(io.RawIOBase):
    """The bytes below a text stream. Safe in threads, signal handlers, finalizers, and after a fork.

    The caller's thread writes what the reader takes at once, so that a line is there when the process dies. A thread
    writes the rest. Once a line was dropped, all are until nothing waits: one line then says how many. What waits when
    the outlet is closed still goes to its own file, never to another one with the same number.

    Args:
        descriptor: of the file, pipe, socket or terminal.
        most: bytes that may wait.
    """

    def __init__(self, descriptor: int, *, most: int = MOST_WAITING) -> None:
        super().__init__()
        self.name = descriptor
        self.mode = "wb"
        self.said: Callable[[int], str] = said
        self.dropped = 0
        """Lines dropped so far."""
        self._descriptor = descriptor
        self._most = most
        self._own, self._is_direct = _opened(descriptor)
        self._begin()

    def _begin(self) -> None:
        self._guard = threading.RLock()  # a finalizer may write in the midst of a write
        self._inbox: SimpleQueue[bytes] = SimpleQueue()
        self._waiting = 0
        self._lost = 0
        self._thread: threading.Thread | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes, /) -> int:  # type: ignore[override] # bytes is all that a text stream writes
        """Write or keep the data, or count its lines. Never waits, never raises."""
        data = bytes(data)
        with self._guard:
            if self.closed:
                self._drop(data)
            elif not self._waiting:
                text = self._mark() + data
                rest = self._take(text) if self._is_direct else text
                if rest is None:
                    self._drop(data)
                else:
                    self._lost = 0
                    self._keep(rest)
            elif self._lost or self._waiting + len(data) + _EACH > self._most:
                self._drop(data)
            else:
                self._keep(data)
        return len(data)

    def drain(self, seconds: float) -> bool:
        """Wait at most so long until nothing waits; False when something does."""
        until = time.monotonic() + seconds
        while self._waiting and time.monotonic() < until:
            time.sleep(LINES_LOOK_S)
        return not self._waiting

    def close(self) -> None:
        with self._guard:
            if self.closed:
                return
            super().close()
            if self._has_thread():
                self._inbox.put(_END)  # it may be in the midst of a write
            else:
                os.close(self._own)

    def forked(self) -> None:
        """In the child of a fork: the parent has the thread, and writes what waits."""
        self._is_direct = True  # a child that ends at once must not leave its lines in a queue
        self._begin()

    def _mark(self) -> bytes:
        """The line in place of the lines that were dropped so far."""
        return self.said(self._lost).encode(errors="backslashreplace") if self._lost else b""

    def _drop(self, data: bytes) -> None:
        lines = data.count(b"\n") or 1
        self._lost += lines
        self.dropped += lines

    def _has_thread(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        if not self._has_thread():
            thread = threading.Thread(target=self._serve, name="lines", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread: the process is at its end, or at a limit
                self._drop(data)
                return
            self._thread = thread
        self._waiting += len(data) + _EACH
        self._inbox.put(data)

    def _take(self, data: bytes) -> bytes | None:
        """Write what is taken at once; the rest, or None: the reader is gone, or the disk is full."""
        try:
            return data[os.write(self._own, data) :]
        except BlockingIOError:
            return data
        except OSError:
            return None

    def _serve(self) -> None:
        ready = select.poll()
        ready.register(self._own, select.POLLOUT)
        while True:
            pieces = [self._inbox.get()]
            with suppress(Empty):
                while sum(map(len, pieces)) < io.DEFAULT_BUFFER_SIZE:
                    pieces.append(self._inbox.get_nowait())
            rest: bytes | None = b"".join(pieces)
            while rest:
                if self._is_direct:
                    ready.poll()
                left, rest = rest, self._take(rest)
            with self._guard:
                self._waiting -= sum(len(piece) + _EACH for piece in pieces if piece)
                if rest is None:
                    self._drop(left)
                elif not self._waiting and self._lost:
                    mark, self._lost = self._mark(), 0
                    self._keep(mark)
                if _END in pieces:
                    if not self._waiting:
                        os.close(self._own)
                        return
                    self._inbox.put(_END)


def _opened(descriptor: int) -> tuple[int, bool]:
    """A descriptor of our own for the same file, and whether a write to it never waits.

    The flag O_NONBLOCK belongs to the open file, which other processes share: so a pipe or a terminal is opened again.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        with suppress(OSError):  # a socket, another user's pipe, or not Linux
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), True
        return os.dup(descriptor), False
    return os.dup(descriptor), True


def without_waiting(stream: TextIO) -> TextIO:
    """The same stream for writers that must not wait; a stream in memory stays as it is."""
    if outlet_of(stream) is not None:
        return stream
    known = _known.get(stream)
    if known is None:
        try:
            descriptor = stream.fileno()
            stream.flush()
            outlet = Outlet(descriptor)
        except (OSError, ValueError):
            return stream
        known = io.TextIOWrapper(outlet, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
        _known[stream] = known
    return known


def outlet_of(stream: TextIO) -> Outlet | None:
    """The outlet below a stream; None for one whose writers may have to wait."""
    below = getattr(stream, "buffer", None)
    return below if isinstance(below, Outlet) else None


def open_outlets() -> None:
    """Make standard output and standard error of this process streams whose writers never wait."""
    sys.stdout, sys.stderr = (stream and without_waiting(stream) for stream in (sys.stdout, sys.stderr))
    atexit.register(end_lines)


def end_lines(seconds: float = LINES_END_S) -> None:
    """Wait for a reader of the last lines, within this time, before the process ends."""
    until = time.monotonic() + seconds
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None and outlet_of(stream) is not None:
                stream.flush()
    for outlet in _outlets():
        outlet.drain(max(0.0, until - time.monotonic()))


def dropped_lines() -> int:
    return sum(outlet.dropped for outlet in _outlets())


def _outlets() -> list[Outlet]:
    return [outlet for stream in list(_known.values()) if (outlet := outlet_of(stream)) is not None]


def _forked() -> None:
    for outlet in _outlets():
        outlet.forked()


os.register_at_fork(after_in_child=_forked)
