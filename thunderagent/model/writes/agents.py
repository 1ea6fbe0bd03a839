"""Conditional writes of agents: their rows, their turns, the sign of their region, the journals of their streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thunderagent.model.conditions import Above, Absent, Below, Either, Is, Mistyped, Present, Write
from thunderagent.model.task import timestamp

TURN_AHEAD_S: Final = 30.0
"""A turn that ends this much later than one which begins now is void: clocks of agents do not differ so much."""


AGENT_STATUS: Final = "AGENT"


def take_turn(turn_id: str, *, owner: str, now: float, until: float) -> Write:
    """One agent gets the turn for a piece of housekeeping; the turn expires at `until`.

    A turn that would last longer than any was taken before the clock was set back; one without a time is free.
    """
    ahead = timestamp(until + TURN_AHEAD_S)
    free = (Absent("lockTime"), Below("lockTime", timestamp(now)), Above("lockTime", ahead), Mistyped("lockTime"))
    return Write(
        verb="take turn",
        task_id=turn_id,
        set={"leaseOwner": owner, "lockTime": timestamp(until)},
        require=(Present("taskId"), Either(free)),
    )


def keep_places(turn_id: str, places: Mapping[str, Any], *, owner: str) -> Write:
    """Keep where the sweep of this turn has ended, for the agent that gets the next turn."""
    return Write(
        verb="keep places",
        task_id=turn_id,
        set={"info": dict(places)} if places else {},
        remove=() if places else ("info",),
        require=(Is("leaseOwner", owner),),
    )


def announce(agent_id: str, *, info: Mapping[str, Any], now: float, expire_at: float) -> Write:
    """Say that an agent is alive, and what it runs."""
    return Write(
        verb="announce",
        task_id=agent_id,
        set={"info": dict(info), "updatedAt": timestamp(now), "expireAt": float(int(expire_at))},
        require=(Is("status", AGENT_STATUS),),
    )


def sentinel(region: str, *, now: float) -> Write:
    """A sign of the region that has the grant; in another region its age tells how far the table there is behind."""
    return Write(
        verb="sentinel",
        task_id=sentinel_id(region),
        set={"updatedAt": timestamp(now)},
        require=(Present("taskId"),),
    )


def sentinel_id(region: str) -> str:
    return f"sentinel:{region}"


def journal(journal_id: str, *, info: Mapping[str, Any], now: float, expire_at: float) -> Write:
    """What happened to a stream under one fence; without a status, so that no index entry is written."""
    return Write(
        verb="journal",
        task_id=journal_id,
        set={"info": dict(info), "updatedAt": timestamp(now), "expireAt": float(int(expire_at))},
        require=(Present("taskId"),),
    )
