"""Handlers that are the end of their agent, or keep it from renewing its leases."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job


class Seconds(BaseModel):
    """How long."""

    seconds: float


@job("deadly.kill")
def kill(ctx: Context, payload: Seconds) -> None:
    """What the kernel does to a process that needs too much memory."""
    time.sleep(payload.seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@job("deadly.beside")
def beside(ctx: Context, payload: Seconds) -> str:
    """An innocent one."""
    ctx.wait(payload.seconds)
    return "done"


@job("deadly.hold")
def hold(ctx: Context, payload: Seconds) -> None:
    """A call that keeps the interpreter to itself: no other thread runs, nor the heartbeat."""
    ctypes.PyDLL(None).usleep(int(payload.seconds * 1e6))
