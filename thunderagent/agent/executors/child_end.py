"""The end of a child process: exit code or signal, peak memory, and whether the kernel killed it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from thunderagent.model.memory import kernel_kills, of_usage, peak_mib

DESCENDANTS_END_S: Final = 1.0
"""How long processes of handlers may take to end after SIGTERM, before they are killed."""


ROUGH_MIB: Final = 16.0
"""Error of the kernel's count while threads take pages: a copy of the agent may seem so much larger."""


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a child process."""

    code: int
    """Exit code, or the negative number of a signal."""
    peak_mib: float | None = None
    """Peak resident memory of the child, of a process that it waited for, or of the agent of which it was a copy."""
    agent_mib: float = 0.0
    """Peak of the agent: below it, the peak of the child is not known exactly."""
    kernel_kills: int | None = None
    """Processes of the control group that the kernel killed for memory since the start of the child."""

    def __str__(self) -> str:
        """For the error of its task."""
        if self.code >= 0:
            return f"exit code {self.code}"
        with suppress(ValueError):
            name = signal.Signals(-self.code).name
            if name != "SIGKILL":
                return name
            cause = "by the kernel's OOM killer: out of memory" if self.kernel_kills else "out of memory?"
            return f"{name}{' ' if self.kernel_kills else ', '}{cause}"
        return f"signal {-self.code}"

    def memory(self, job: str) -> str:
        """Its peak memory, for the error of a task that was killed; empty if it is not known."""
        if self.code != -signal.SIGKILL or self.peak_mib is None:
            return ""
        if self.peak_mib > self.agent_mib + ROUGH_MIB:
            return f"; the process of {job} had {self.peak_mib:.0f} MiB of memory at its peak"
        return f"; the process of {job} never had more than {self.peak_mib:.0f} MiB of memory"


def reap(child: subprocess.Popen[str], seconds: float, *, kills_before: int | None = None) -> ChildEnd:
    """Wait for the end of a child, end the rest of its process group, and read what the kernel knows of it.

    Args:
        child: the process.
        seconds: longest wait.
        kills_before: `kernel_kills()` from before its start.

    Raises:
        subprocess.TimeoutExpired: it goes on.
    """
    agent_mib = peak_mib()
    ended = _waited(child, seconds)
    code, usage = ended if ended is not None else (child.wait(seconds), None)
    if ended is None:
        _end_group(child.pid)
    kills = kernel_kills() if code == -signal.SIGKILL and kills_before is not None else None
    return ChildEnd(
        code=code,
        peak_mib=usage,
        agent_mib=agent_mib,
        kernel_kills=None if kills is None or kills_before is None else max(0, kills - kills_before),
    )


def _waited(child: subprocess.Popen[str], seconds: float) -> tuple[int, float] | None:
    """Exit code and peak memory in MiB of a child once it has ended; None if the kernel does not know the peak."""
    if child.returncode is not None or not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(child.pid)
    except OSError:  # it was waited for by another thread, or the kernel is older than 5.3
        return None
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        if not ended.poll(seconds * 1000):
            raise subprocess.TimeoutExpired(child.args, seconds)
        _end_group(child.pid)  # before its number is free for another process
        _, status, usage = os.wait4(child.pid, 0)
    except ChildProcessError:
        return None
    finally:
        os.close(descriptor)
    child.returncode = code = os.waitstatus_to_exitcode(status)
    return code, of_usage(usage.ru_maxrss)  # a thread that asks meanwhile may take the end for one without a code


def _end_group(leader: int) -> None:
    """Kill what a handler has started, after the child that leads the group has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_descendants(seconds: float = DESCENDANTS_END_S) -> int:
    """End the processes that handlers in threads of this process have started.

    They get SIGTERM, and SIGKILL after this time. Processes in a session of their own are left alone, and so are those
    whose parent has ended. Needs `/proc`.

    Returns:
        number of the processes.
    """
    found = _descendants()
    for number in (signal.SIGTERM, signal.SIGKILL) if found else ():
        for pid in _descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        until = time.monotonic() + seconds
        while _descendants() and time.monotonic() < until:
            threading.Event().wait(0.01)
    return len(found)


def _descendants() -> list[int]:
    """The processes below this one that are in its session and have not ended."""
    session, parents = os.getsid(0), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, parent, _, in_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(in_session) == session and state not in "ZX":
                parents[int(stat.parent.name)] = int(parent)
    found = [os.getpid()]
    for pid in found:  # it grows meanwhile
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
