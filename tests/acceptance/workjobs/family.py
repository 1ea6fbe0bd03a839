"""Handlers that start processes, and leave them behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

LONG_LIVED = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Family(BaseModel):
    """Where the number of the process is told, and whether the handler ends before it."""

    file: Path
    waits: bool = False
    detached: bool = False


def _start(ctx: Context, payload: Family) -> int:
    child = subprocess.Popen([sys.executable, "-c", LONG_LIVED], start_new_session=payload.detached)
    part = payload.file.with_suffix(".part")
    part.write_text(str(child.pid), encoding="utf-8")
    part.replace(payload.file)
    if payload.waits:
        ctx.wait(600)
        ctx.check()
    return child.pid


@job("family.sync")
def sync(ctx: Context, payload: Family) -> int:
    """In a thread."""
    return _start(ctx, payload)


@job("family.isolated", isolation="process")
def isolated(ctx: Context, payload: Family) -> int:
    """In a process of its own."""
    return _start(ctx, payload)
