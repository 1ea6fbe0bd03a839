"""The connection of an engine to its SQLite file, which no forked child inherits.

The locks of a file are those of the process. A child with a connection of its parent believes in locks that it does not
have: others take the log away under it, and what it acknowledges is lost. So all connections are closed before a fork,
when nobody is inside, and parent and child open the file again when they need it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final

from thunderagent.model.errors import ConfigurationError
from thunderagent.stores.sqlite.access import OpenedFile

MEMORY: Final = ":memory:"
FORK_S: Final = 5.0
"""Longest wait of a fork for threads that are inside. After a wait in vain its child may not use the file."""

_forking = threading.RLock()
"""Held by the thread that forks. Taken before the guard of a link, never inside of one."""

_is_forking = False

_links: Final[set[Link]] = set()
_aside: Final[list[Link]] = []
"""The links whose guards the forking thread has."""


def any_text(kept: bytes) -> str | bytes:
    """The text in a column; bytes when it is not UTF-8. A connection that reads with it takes a third longer."""
    try:
        return kept.decode()
    except UnicodeDecodeError:
        return kept


class Link:
    """One connection behind a lock, opened on first use. Safe in threads.

    Args:
        path: of the file, absolute; or `MEMORY`.
        connect: opens it.
    """

    def __init__(self, path: str, connect: Callable[[str], sqlite3.Connection]) -> None:
        self.path = path
        self.file = OpenedFile(path)
        self._connect = connect
        self._guard = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._user: int | None = None
        """The thread that is inside."""
        with _forking:  # a link that is made beside a fork is not opened before the fork is over
            _links.add(self)

    @contextmanager
    def used(self) -> Iterator[sqlite3.Cursor]:
        """A cursor of the connection, for this thread alone; it ends with the block.

        A statement that outlives the block would keep the file open when its connection is closed.

        Raises:
            ConfigurationError: it belongs to the parent of this process.
            StoreUnavailable: the file was deleted or replaced.
        """
        me = threading.get_ident()
        # Another would take the guard again and again before the forking thread, which waits for the one inside.
        if _is_forking and self._user != me:
            with _forking:
                pass
        with self._guard:
            before, self._user = self._user, me
            try:
                with closing(self._open().cursor()) as cursor:
                    yield cursor
            finally:
                self._user = before

    def take_any_text(self) -> None:
        """Read texts that are not UTF-8 as bytes, as long as this connection is open."""
        with self._guard:
            if self._connection is not None:
                self._connection.text_factory = any_text

    def close(self) -> None:
        """Close the connection; the next use opens the file that is there then."""
        with self._guard:
            self._shut()
            if self._connection is None:
                self.file = OpenedFile(self.path)

    def drop(self) -> None:
        """Close the connection, which nobody uses any more; a thread that has the guard forks, and closes it too."""
        if self._guard.acquire(blocking=False):
            try:
                self._shut()
            finally:
                self._guard.release()
        if not self._is_inherited:
            _links.discard(self)

    def put_aside(self, until: float) -> bool:
        """Take the guard before a fork and close the connection; False when a thread is inside for too long.

        A fork in the middle of the thread's own use, as in a signal handler, keeps the connection open.
        """
        if not self._guard.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        if self._user is None and self.path != MEMORY:
            self._shut()
        return True

    def renew(self) -> None:
        """Be free in a forked child."""
        self._guard = threading.RLock()
        self._user = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.file.look(at_once=True)  # the same file is opened again after a fork, and no other
            if any(link._is_inherited and link.file.is_at(self.path) for link in list(_links)):
                raise self._refusal()
            self._connection, self._pid = self._connect(self.path), os.getpid()
            if self.path != MEMORY:
                self.file.opened()
        elif self._is_inherited:
            raise self._refusal()
        else:
            self.file.look()
        return self._connection

    @property
    def _is_inherited(self) -> bool:
        return self._connection is not None and self._pid != os.getpid()

    def _shut(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
            self._connection = None

    def _refusal(self) -> ConfigurationError:
        if self.path == MEMORY:
            return ConfigurationError(
                "a store in memory belongs to the process that made it, and this is a forked child of it: use a file, "
                "for example sqlite:///thunderagent.db"
            )
        return ConfigurationError(
            f"the database {self.path} was in use when this process was forked and could not be closed before: what is "
            "written here could be lost. Open the store after the fork (uWSGI: enable-threads or lazy-apps), or start "
            "the process with spawn"
        )


def _before() -> None:
    global _is_forking
    _forking.acquire()
    _is_forking = True
    until = time.monotonic() + FORK_S
    _aside.extend(link for link in list(_links) if link.put_aside(until))


def _after_in_parent() -> None:
    global _is_forking
    while _aside:
        _aside.pop()._guard.release()
    _is_forking = False
    _forking.release()


def _after_in_child() -> None:
    global _forking, _is_forking
    _forking, _is_forking = threading.RLock(), False
    _aside.clear()
    for link in list(_links):
        link.renew()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
