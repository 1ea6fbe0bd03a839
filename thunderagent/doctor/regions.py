"""The check of the arbiter: whether it answers, and who has the grant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from thunderagent.errors import ThunderAgentError
from thunderagent.findings import Finding, State
from thunderagent.grants import TAKER_SHARE
from thunderagent.port import Engine
from thunderagent.region_commands import Regions
from thunderagent.settings import PREFIX, Settings

NAME = "region"


def look_at_region(settings: Settings, opening: Callable[[str], Engine]) -> Iterator[Finding]:
    """What the arbiter of the settings tells; nothing where there is one region."""
    if settings.region_arbiter is None:
        return
    engine = opening(settings.region_arbiter)
    try:
        record = Regions(engine, settings.region_scope).status()
        now = engine.clock.now()
    except ThunderAgentError as error:
        yield Finding(NAME, State.WRONG, f"the arbiter is of no use: {error}", _remedy())
        return
    finally:
        engine.close()
    if record is None:
        first = settings.region_preferred or "the first region that is well"
        yield Finding(NAME, State.OK, f"no region had the grant of {settings.region_scope!r} yet: {first} begins")
        return
    age_s = now - record.updated_at
    found = f"{record.holder} has the grant, epoch {record.epoch}; last sign {age_s:.0f} s ago"
    if age_s > record.lease_s * TAKER_SHARE:
        remedy = "agents there do not run, are not well, or do not reach the arbiter; see: thunderagent region status"
        yield Finding(NAME, State.WARNING, f"{found}: nobody renews it", remedy)
    elif record.frozen is not None:
        yield Finding(NAME, State.WARNING, f"{found}; frozen: {record.frozen}", "thunderagent region thaw")
    else:
        here = "" if record.holder == settings.region else f"; the agents of {settings.region} wait"
        yield Finding(NAME, State.OK, found + here)


def _remedy() -> str:
    return f"look at the table of {PREFIX}REGION_ARBITER, and at the policy: thunderagent iam agent"
