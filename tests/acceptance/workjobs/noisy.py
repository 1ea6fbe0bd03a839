"""Handlers that print more than a pipe holds."""

from __future__ import annotations

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job


class Noise(BaseModel):
    """How much."""

    lines: int = 1000


def _print(ctx: Context, payload: Noise) -> int:
    for number in range(payload.lines):
        print(f"{ctx.task_id} says its line number {number:06d}")  # noqa: T201
    return payload.lines


@job("noisy.sync")
def sync(ctx: Context, payload: Noise) -> int:
    """In a thread."""
    return _print(ctx, payload)


@job("noisy.async")
async def async_(ctx: Context, payload: Noise) -> int:
    """On the event loop."""
    return _print(ctx, payload)


@job("noisy.isolated", isolation="process")
def isolated(ctx: Context, payload: Noise) -> int:
    """In a process of its own."""
    return _print(ctx, payload)
