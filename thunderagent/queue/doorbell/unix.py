"""The doorbell of agents on one machine: Unix datagram sockets in a folder beside the SQLite file.

Each listening agent has one socket, `<database>-bells/<pid>-<random>.bell`. A sender sends to all of them and waits for
none. The kernel drops a socket with its process and leaves the file; a sender that finds a file without a socket
deletes it. On a system without such sockets nothing is sent and the agents poll.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from thunderagent.model.errors import DoorbellError
from thunderagent.model.forks import renewed
from thunderagent.queue.doorbell.message import MAX_BYTES, DoorbellMessage, pack, parse
from thunderagent.queue.doorbell.port import Accepts

FOLDER: Final = "-bells"
SUFFIX: Final = ".bell"
LONGEST_PATH: Final = 100
"""Bytes of an address; the system allows 107 on Linux and 103 on macOS."""

AT_ONCE: Final = 100
"""Packets that one `listen` takes at most."""

CHECK_S: Final = 5.0
"""Seconds between two checks that the socket of a listener still has its name."""

CLOSE_S: Final = 1.0
BORN_S: Final = 60.0
"""Age at which a socket without its final name is deleted: its process died."""

WAKE: Final = b"."
"""Wakes our own listener; no packet, so that it does nothing else."""


class LocalDoorbell:
    """Messages between the processes of one machine with one database file. It opens nothing before `listen`.

    Args:
        database: the SQLite file; the folder of the sockets is beside it.
    """

    is_local = True

    def __init__(self, database: str | Path) -> None:
        path = Path(os.path.realpath(database))
        self._database = path
        self.folder = path.with_name(path.name + FOLDER)
        self.is_healthy = hasattr(socket, "AF_UNIX")
        self._listening = renewed(threading.Lock())
        self._socket: socket.socket | None = None
        self._name = ""
        self._pid = 0
        self._closed = False

    def ring(self, messages: Sequence[DoorbellMessage]) -> None:
        packets = [packet.encode() for packet in pack(messages)]
        if not packets or not self.is_healthy:
            return
        try:
            names = _bells(self.folder)
            if names:
                with _reached(self.folder) as place, _datagrams() as sender:
                    for name in names:
                        _send(sender, self.folder, place, name, packets)
        except OSError:  # the folder is gone, or no file can be opened: the agents poll
            return

    def listen(self, timeout_s: float, accepts: Accepts) -> list[DoorbellMessage]:
        with self._listening:
            try:
                listening = self._open()
                poll = select.poll()  # not select: an agent may have thousands of files open
                poll.register(listening, select.POLLIN)
                ready = poll.poll(max(0.0, min(timeout_s, CHECK_S)) * 1000)
                messages: list[DoorbellMessage] = []
                for _ in range(AT_ONCE if ready else 0):
                    try:
                        packet = listening.recv(MAX_BYTES + 1)
                    except BlockingIOError:
                        break
                    messages += [message for message in parse(packet) or () if accepts(message)]
                return messages
            except OSError as error:
                self._drop()
                raise DoorbellError(
                    f"no socket can be opened in {self.folder} ({error}): "
                    "agents of this machine find new tasks by polling"
                ) from error

    def close(self) -> None:
        self._closed = True
        if self._socket is not None and self._pid == os.getpid():
            with suppress(OSError), _reached(self.folder) as place, _datagrams() as sender:
                _send(sender, self.folder, place, self._name, [WAKE])
        if self._listening.acquire(timeout=CLOSE_S):
            self._listening.release()
        self._drop()

    def _open(self) -> socket.socket:
        if self._closed:
            raise OSError("the doorbell was closed")
        if self._socket is None or self._pid != os.getpid() or not self._has_name():
            return self._bind()
        return self._socket

    def _has_name(self) -> bool:
        """False when the file of our socket was deleted, so that no sender finds it."""
        return bool(self._name) and (self.folder / self._name).exists()

    def _bind(self) -> socket.socket:
        if self._socket is not None:
            self._socket.close()
        mode = _mode(self._database)
        with suppress(FileExistsError):
            self.folder.mkdir()
            self.folder.chmod(mode | (mode & 0o444) >> 2)  # users of the database may ring
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        with _reached(self.folder) as place:
            self._socket = listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            listening.setblocking(False)
            listening.bind(f"{place}/{name}")
            # Its final name comes last: senders take a file without a socket for one of a dead process.
            (self.folder / name).chmod(mode)
            (self.folder / name).rename(self.folder / (name + SUFFIX))
        self._name, self._pid = name + SUFFIX, os.getpid()
        self._clean()
        return listening

    def _clean(self) -> None:
        """Delete what dead processes have left."""
        with _reached(self.folder) as place, _datagrams() as sender:
            for other in _bells(self.folder):
                if other != self._name:
                    _send(sender, self.folder, place, other, ())
        for other in os.listdir(self.folder):
            path = self.folder / other
            with suppress(OSError):
                if not other.endswith(SUFFIX) and time.time() - path.stat().st_mtime > BORN_S:
                    path.unlink()

    def _drop(self) -> None:
        listening, self._socket = self._socket, None
        if listening is not None:
            if self._pid == os.getpid():
                with suppress(OSError):
                    (self.folder / self._name).unlink()
            listening.close()


def _mode(database: Path) -> int:
    try:
        return stat.S_IMODE(database.stat().st_mode) & 0o666
    except OSError:
        return 0o600


def _bells(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []


@contextmanager
def _datagrams() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        yield sender


@contextmanager
def _reached(folder: Path) -> Iterator[str]:
    """A short name of the folder: a socket's address has room for a hundred bytes."""
    path = str(folder)
    if len(os.fsencode(path)) + 40 <= LONGEST_PATH:
        yield path
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def _send(sender: socket.socket, folder: Path, place: str, name: str, packets: Sequence[bytes]) -> None:
    """Send to one socket, and delete its file if there is no socket behind it."""
    try:
        sender.connect(f"{place}/{name}")
        for packet in packets:
            sender.send(packet)
    except ConnectionRefusedError:
        with suppress(OSError):
            (folder / name).unlink()
    except OSError:  # a full buffer, a socket of another user, one that has just gone
        return
