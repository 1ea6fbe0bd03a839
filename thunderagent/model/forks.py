"""Locks and connections in a forked child: locks are free, connections of the parent are closed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakSet

T = TypeVar("T")

_connections: Final[WeakKeyDictionary[Any, Callable[[Any], object]]] = WeakKeyDictionary()
_locks: Final[WeakSet[Any]] = WeakSet()


def renewed(lock: T) -> T:
    """The same lock or event, which a forked child finds free: the thread that held it is not there.

    It is for locks that are held for a moment and guard values that are valid at each of them.
    """
    _locks.add(lock)
    return lock


def of_this_process(connection: T, close: Callable[[T], object]) -> None:
    """Close this connection in forked children: one that ends here must not stay open there."""
    _connections[connection] = close


def _renew() -> None:
    for connection, close in list(_connections.items()):
        with suppress(OSError):  # it has ended already
            close(connection)
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew)
