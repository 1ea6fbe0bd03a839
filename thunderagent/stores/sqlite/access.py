"""Whether the file of an embedded store is still the one that was opened, and who may write to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import StoreUnavailable

LOOK_S: Final = 1.0

_Identity = tuple[int, int]


class OpenedFile:
    """Notices that the file was deleted or replaced while it was open.

    SQLite goes on with a file that has no name any more: what is enqueued in the new one would never be seen, and what
    is written would be gone. The new file is not opened instead, as it may be another queue. Nor is the old one used
    again when it is put back: others may have begun another log for it meanwhile.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: _Identity | None = None
        self._next_look = 0.0
        self._problem = ""

    def opened(self) -> None:
        """From now on the open file must be this one."""
        if self._known is None:
            self._known = _identity(self._path)

    def same_as(self, other: OpenedFile) -> None:
        """It must be the file that another connection has."""
        self._known = other._known

    def is_at(self, path: str) -> bool:
        """Whether the file is the one at this path, by whatever name."""
        try:
            return self._known is not None and _identity(path) == self._known
        except OSError:
            return False

    def look(self, *, at_once: bool = False) -> None:
        """Look at the file, at most once in `LOOK_S` unless `at_once`.

        Raises:
            StoreUnavailable: it was another file at some look, or none. Only a new connection ends that.
        """
        now = since_boot()
        if self._known is not None and (at_once or now >= self._next_look) and not self._problem:
            self._next_look = now + LOOK_S
            self._problem = self._seen()
        if self._problem:
            raise StoreUnavailable(self._problem)

    def _seen(self) -> str:
        try:
            if _identity(self._path) == self._known:
                return ""
        except (FileNotFoundError, NotADirectoryError):
            what, remedy = "deleted", "which then make a new one unless it was put back before"
        except OSError:  # not to be seen now, which says nothing
            return ""
        else:
            # SQLite cannot tell whose log it finds beside a file, and would write it into the file.
            log = f"{self._path}-wal"
            what, remedy = "replaced", f"and while they are stopped delete {log} and -shm if they are of the old file"
        return f"the file {self._path} was {what} while it was open: restart the agents, {remedy}"


def _identity(path: str) -> _Identity:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def denied(path: str) -> str | None:
    """What the user of this process may not do with the file or its folder, with the remedy; None: all is allowed.

    Nothing is opened: to close the file again would end the locks of other connections of this process.
    """
    file, folder = Path(path).absolute(), Path(path).absolute().parent
    if not may(folder, os.X_OK):
        return f"{who()} cannot enter the folder {folder}: {remedy_for(folder, 'rx')}"
    for one in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
        if one.exists():
            for mode, verb, letter in ((os.R_OK, "read", "r"), (os.W_OK, "write to", "w")):
                if not may(one, mode):
                    return f"{who()} cannot {verb} {one}: {remedy_for(one, letter)}"
    if not may(folder, os.W_OK):
        return f"{who()} cannot write to the folder {folder} of the file and its log: {remedy_for(folder, 'w')}"
    return None


def who() -> str:
    return f"the user {os.geteuid()}"


def remedy_for(path: Path, mode: str = "w") -> str:
    """How the user of this process gets access to a file or folder.

    Args:
        path: of it.
        mode: what is missing, as the letters of chmod.
    """
    try:
        found, is_frozen = path.stat(), bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return "run agents and commands as one user, who owns it"
    if is_frozen and "w" in mode:
        return "its file system is mounted read-only: mount it for writing, or name another file in THUNDERAGENT_STORE"
    has = f"it belongs to the user {found.st_uid} and has the mode {found.st_mode & 0o7777:04o}"
    if found.st_uid == os.geteuid():
        return f"{has}: chmod u+{mode} {path}, and run agents and commands as one user"
    return f"{has}: run agents and commands as one user, or chown {path}"


def may(path: Path, mode: int) -> bool:
    """Whether the user of this process may do that, as for `os.access`. Nothing is opened."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)
