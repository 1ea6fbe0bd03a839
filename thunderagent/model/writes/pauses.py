"""Conditional writes of the row of pauses: `info` has an entry for each queue, job and agent that is paused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thunderagent.model.conditions import Absent, Is, Present, Write
from thunderagent.model.rows import is_count
from thunderagent.model.task import Row, timestamp

CONTROL_ID: Final = "control:"


def control_row(info: Mapping[str, Any], *, now: float) -> Row:
    return {"taskId": CONTROL_ID, "info": dict(info), "fence": 1, "updatedAt": timestamp(now)}


def set_controls(seen: Row, info: Mapping[str, Any], *, now: float) -> Write:
    """Change what is paused, unless the row has changed since it was seen."""
    fence, verb, changed = seen.get("fence"), "set controls", {"info": dict(info), "updatedAt": timestamp(now)}
    if fence is not None and not is_count(fence):  # a row made by hand: it gets a fence
        return Write(verb=verb, task_id=CONTROL_ID, set={**changed, "fence": 1}, require=(Present("fence"),))
    as_seen = (Present("taskId"), Absent("fence") if fence is None else Is("fence", fence))
    return Write(verb=verb, task_id=CONTROL_ID, set=changed, increase={"fence": 1}, require=as_seen)
