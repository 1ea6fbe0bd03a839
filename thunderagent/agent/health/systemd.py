"""What systemd is told of a process that it started as `Type=notify`: a datagram to the socket that it names."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class Systemd:
    """The service manager that started this process; nobody, when it was not systemd.

    Args:
        environ: of the process: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        if address.startswith("@"):  # the abstract namespace of Linux
            address = f"\0{address[1:]}"
        self._address = address if address.startswith(("/", "\0")) else ""
        self.watchdog_s = _watchdog_s(environ) if self._address else None
        """Seconds without a `WATCHDOG=1` after which the process is killed; None: no watchdog looks at it."""

    def tell(self, **facts: object) -> None:
        """Tell facts such as `READY=1`, in one datagram. A manager that does not take it is no harm."""
        if not self._address:
            return
        text = "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in facts.items())
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.setblocking(False)
            one.sendto(text.encode(), self._address)


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """None when the watchdog is off, or looks at another process, whose child we are."""
    seconds, of = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not seconds.isdecimal() or int(seconds) == 0 or of not in ("", str(os.getpid())):
        return None
    return int(seconds) / 1e6
