"""Examines the file of an embedded store without changing it, or making it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.stores.sqlite.access import may, remedy_for, who
from thunderagent.stores.sqlite.engine import MEMORY
from thunderagent.stores.sqlite.schema import MIGRATIONS, USABLE_FROM, usable_from, version_of

LOW_BYTES: Final = 1 << 30
EMPTY_BYTES: Final = 64 << 20
LONG_LOG_BYTES: Final = 256 << 20
"""A write-ahead log begins again at 8 MiB unless a reader needs its old pages."""

MUCH_FREE_BYTES: Final = 256 << 20
"""Free space that is worth a warning in a file of an older version, which never shrinks by itself."""

AHEAD_S: Final = 60.0
"""Age below 0 of a file that shows that the clock of the host was set back."""

_NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "fuse.s3fs", "fuse.glusterfs"})
_READ_S: Final = 2.0


def look_at_file(
    path: str,
    *,
    now: Callable[[], float] = time.time,
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    mounts: Path = Path("/proc/mounts"),
) -> Iterator[Finding]:
    """The file, its folder, its disk, its write-ahead log and the clock.

    Args:
        path: of the database; it may be missing.
        now: the clock of the host, in epoch seconds.
        free: free bytes for a folder.
        mounts: the system's list of file systems.
    """
    if path == MEMORY:
        yield Finding("file", State.WARNING, "a store in memory ends with its process", "for tests only")
        return
    file, folder = Path(path).absolute(), Path(path).absolute().parent
    if not folder.is_dir():
        yield Finding("file", State.WRONG, f"the folder {folder} does not exist", f"mkdir -p {folder}")
        return
    access = _access(file, folder)
    yield access
    yield _disk(folder, free(folder))
    if kind := _network(folder, mounts):
        what = f"{folder} is on {kind}: SQLite's write-ahead log does not work over a network, rows can be lost"
        yield Finding("file system", State.WRONG, what, "move the file to a local disk, or use a dynamodb:// store")
    if file.is_file():
        yield from _log(file, may_use=access.state is not State.WRONG)
        yield _clock(file, now())


def _access(file: Path, folder: Path) -> Finding:
    try:  # SQLite puts its log beside the file, so the folder must be writable too
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"{who()} cannot write to the folder {folder}: {error.strerror}"
        return Finding("file", State.WRONG, what, remedy_for(folder))
    if not file.exists():
        return Finding("file", State.OK, f"{file} is not there yet; the first enqueue or agent makes it")
    for one in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
        if one.exists() and not may(one, os.R_OK | os.W_OK):  # not opened: closing it would end locks of this process
            return Finding("file", State.WRONG, f"{who()} cannot write to {one}", remedy_for(one))
    return Finding("file", State.OK, f"{file}, {_size(file.stat().st_size)}")


def _disk(folder: Path, free: int) -> Finding:
    found, remedy = f"{_size(free)} free for {folder}", f"free some space: du -xh {folder} | sort -h | tail"
    if free < EMPTY_BYTES:
        return Finding("disk", State.WRONG, found, remedy)
    return Finding("disk", State.WARNING, found, remedy) if free < LOW_BYTES else Finding("disk", State.OK, found)


def _network(folder: Path, mounts: Path) -> str | None:
    """The kind of a file system over a network; None for a local one."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    real = folder.resolve()
    over = [(Path(line[1].replace("\\040", " ")), line[2]) for line in lines if len(line) > 2]
    _, kind = max(
        (one for one in over if real.is_relative_to(one[0])), key=lambda one: len(str(one[0])), default=("", "")
    )
    return kind if kind in _NETWORK else None


def _log(file: Path, *, may_use: bool) -> Iterator[Finding]:
    try:
        connection = sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=_READ_S)
        try:
            [mode] = connection.execute("PRAGMA journal_mode").fetchone()
            cursor = connection.cursor()
            version, needed = version_of(cursor), usable_from(cursor)
            [shrinks] = connection.execute("PRAGMA auto_vacuum").fetchone()
            [pages] = connection.execute("PRAGMA freelist_count").fetchone()
            [page] = connection.execute("PRAGMA page_size").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        if not may_use and isinstance(error, sqlite3.OperationalError):
            yield Finding("database", State.SKIPPED, "see above: it cannot be looked at without that permission")
            return
        remedy = "name another file in THUNDERAGENT_STORE, or bring this one back from a backup"
        yield Finding("database", State.WRONG, f"{file} cannot be read as a database: {error}", remedy)
        return
    if version > len(MIGRATIONS):
        what = f"schema version {version}, this ThunderAgent knows versions up to {len(MIGRATIONS)}"
        if needed > len(MIGRATIONS):
            yield Finding("database", State.WRONG, what, "upgrade ThunderAgent here: pip install -U thunderagent")
            return
        yield Finding("database", State.OK, f"{what} and can use it, as its own lacks nothing but columns")
    elif 0 < version < len(MIGRATIONS):
        what = f"schema version {version}: the next write of this release brings it to {len(MIGRATIONS)}"
        if version < USABLE_FROM:
            yield Finding("database", State.WARNING, what, "upgrade all installations that use the file first")
        else:
            yield Finding("database", State.OK, f"{what}, and releases from version {USABLE_FROM} on can go on with it")
    if pages * page > MUCH_FREE_BYTES and not shrinks:
        what = f"{_size(pages * page)} of the file are free for new rows, and cannot be given back"
        remedy = f"once, with all agents stopped: sqlite3 {file} 'PRAGMA auto_vacuum = INCREMENTAL; VACUUM'"
        yield Finding("free space", State.WARNING, what, remedy)
    log = Path(f"{file}-wal")
    size = log.stat().st_size if log.exists() else 0
    if mode != "wal" and version:
        what = f"the journal mode is {mode}: readers wait for the writer"
        yield Finding("write-ahead log", State.WARNING, what, "run any command on the store: it switches to wal")
    elif size > LONG_LOG_BYTES:
        remedy = f"a process reads for a long time: find it with: fuser -v {file}"
        yield Finding("write-ahead log", State.WARNING, f"{_size(size)} long", remedy)
    else:
        yield Finding("write-ahead log", State.OK, f"in use, {_size(size)}")


def _clock(file: Path, now: float) -> Finding:
    ahead = file.stat().st_mtime - now
    if ahead > AHEAD_S:
        what = f"the file was last written {ahead:.0f} s in the future: the clock of this host was set back"
        return Finding("clock", State.WARNING, what, "let the clock be kept: timedatectl set-ntp true")
    return Finding("clock", State.OK, "the clock of this host is the one that all agents here share")


def _size(number: int) -> str:
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= length:
            return f"{number / length:.1f} {unit}"
    return f"{number} bytes"
