"""Locks that a forked child finds free, whatever the other threads of its parent held."""

from __future__ import annotations

import os
from typing import Any, Final, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_locks: Final[WeakSet[Any]] = WeakSet()


def renewed(lock: T) -> T:
    """The same lock or event; a forked child finds it free, as the thread that held it is not there.

    It is for locks that are held for a moment and guard values that hold at each of them.
    """
    _locks.add(lock)
    return lock


def _renew() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew)
