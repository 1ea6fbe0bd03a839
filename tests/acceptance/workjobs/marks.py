"""Handlers talk to the test through files: a mark tells what a run did, a file named `release` lets runs end.

`release.2` lets only runs with fence 2 end, so that a second run can end while the first still holds, and
`release.TASK` and `release.TASK.FENCE` only the runs of that task.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from thunderagent.jobs.context import Context

LOOK_S = 0.02


class Folder(BaseModel):
    """Where the marks of a run go."""

    folder: Path


class Facts(BaseModel):
    """What every run answers."""

    pid: int
    parent: int
    fence: int


def mark(ctx: Context, payload: Folder, what: str, **more: Any) -> None:
    """Write `<task>.<fence>.<what>`, whole or not at all."""
    path = payload.folder / f"{ctx.task_id}.{ctx.fence}.{what}"
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps({"pid": os.getpid(), "parent": os.getppid(), **more}))
    part.replace(path)


def may_end(ctx: Context, payload: Folder) -> bool:
    """True once the test has let this run end."""
    names = (
        "release",
        f"release.{ctx.fence}",
        f"release.{ctx.task_id}",
        f"release.{ctx.task_id}.{ctx.fence}",
    )
    return any((payload.folder / name).exists() for name in names)


def facts(ctx: Context) -> Facts:
    """The result of a run."""
    return Facts(pid=os.getpid(), parent=os.getppid(), fence=ctx.fence)
