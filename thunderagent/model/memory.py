"""Memory of this process in MiB, now and at its peak, and whether the kernel killed a process for it."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

MIB: Final = 1024 * 1024
_UNITS_A_KIB: Final = 1024 if sys.platform == "darwin" else 1
"""`ru_maxrss` counts bytes on macOS and KiB elsewhere."""


def resident_mib(proc: Path = Path("/proc/self")) -> float:
    """Resident memory; without `/proc` its peak, which does not fall."""
    with suppress(OSError, ValueError, IndexError):
        return int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    return peak_mib()


def peak_mib(proc: Path = Path("/proc/self")) -> float:
    """Peak of the resident memory; without `/proc`, that of the parent if that is more."""
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in (proc / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return of_usage(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def of_usage(ru_maxrss: int) -> float:
    """What the kernel says of an ended child."""
    return ru_maxrss / _UNITS_A_KIB / 1024


def kernel_kills(proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processes of this control group that the kernel killed as memory ran out; None: it does not say."""
    with suppress(OSError, ValueError, StopIteration):
        group = next(line for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::"))
        events = (root / group.removeprefix("0::").strip("/") / "memory.events").read_text()
        found = dict(line.split() for line in events.splitlines())
        return int(found["oom_kill"]) if "oom_kill" in found else None
    return None
