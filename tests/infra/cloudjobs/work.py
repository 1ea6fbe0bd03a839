"""What agents need AWS for: results of all sizes, limits, retries, tasks that enqueue tasks, periodic jobs."""

from __future__ import annotations

from typing import Any

from thunderagent import Client, Context, job
from thunderagent.jobs.context import Snooze
from thunderagent.jobs.periodic import periodic
from thunderagent.model.schedules import Tick
from thunderagent.model.ticks import every


@job("cloud.plain", max_retry=0)
def plain(ctx: Context, payload: dict[str, Any]) -> Any:
    """Answers what it is asked to."""
    if payload.get("fail"):
        raise ValueError("as asked")
    if payload.get("snooze") and ctx.fence == 1:
        return Snooze(0.01)
    return payload.get("answer", "done")


@job("cloud.held")
def held(ctx: Context, payload: dict[str, Any]) -> None:
    """Goes on until it is told to stop."""
    ctx.wait(30.0)
    ctx.check()


@job("cloud.limited", limit=1)
def limited(ctx: Context, payload: dict[str, Any]) -> None:
    """One at a time."""


@job("cloud.fan_out")
def fan_out(ctx: Context, payload: dict[str, Any]) -> list[str]:
    """Jobs enqueue too, with the rights of their agent."""
    client = Client.from_settings()
    try:
        return [one.task.id for one in client.enqueue_many(plain, [{"m": m} for m in range(3)])]
    finally:
        client.close()


@periodic(every(1).seconds)
@job("cloud.tick")
def tick(ctx: Context, payload: Tick) -> None:
    """One run a tick."""
