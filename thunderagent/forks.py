"""What a forked child finds otherwise than its parent left it: locks are free, connections of the parent are closed."""

from __future__ import annotations

import os
import socket
from typing import Any, Final, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_sockets: Final[WeakSet[socket.socket]] = WeakSet()
_locks: Final[WeakSet[Any]] = WeakSet()


def renewed(lock: T) -> T:
    """The same lock or event; a forked child finds it free, as the thread that held it is not there.

    It is for locks that are held for a moment and guard values that hold at each of them.
    """
    _locks.add(lock)
    return lock


def of_this_process(sock: socket.socket) -> None:
    """Close this socket in forked children: a connection that ends here must not stay open there."""
    _sockets.add(sock)


def _renew() -> None:
    for sock in list(_sockets):
        sock.close()
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew)
