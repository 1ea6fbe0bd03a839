"""Handlers that keep memory, and handlers that only a kill ends."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

_KEPT: Final[list[bytearray]] = []


class Hunger(BaseModel):
    """How much."""

    mib: int


@job("hungry.keep")
def keep(ctx: Context, payload: Hunger) -> None:
    """Never give it back."""
    ballast = bytearray(payload.mib << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    _KEPT.append(ballast)
