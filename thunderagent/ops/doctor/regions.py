"""The check of regions: whether the arbiter answers, which region has the grant, and agents that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from thunderagent.agent.regions import region_of
from thunderagent.model.errors import StoreError, ThunderAgentError
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.regions.commands import Regions
from thunderagent.regions.grant import TAKER_SHARE
from thunderagent.settings import PREFIX, Settings
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import AgentInfo, TaskStore

NAME = "region"

ANNOUNCED_S = 60.0
"""Seconds after a switch at which rows of agents of the earlier region are stale; younger rows are of living agents."""


def look_at_region(settings: Settings, opening: Callable[[str], Engine]) -> Iterator[Finding]:
    """Findings about the arbiter of the settings; none for a single region."""
    if settings.region_arbiter is None:
        return
    yield from _places(settings)
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
        yield Finding(NAME, State.WARNING, f"{found}: no agent renews it", remedy)
    elif record.frozen is not None:
        yield Finding(NAME, State.WARNING, f"{found}; frozen: {record.frozen}", "thunderagent region thaw")
    else:
        here = "" if record.holder == settings.region else f"; the agents of {settings.region} wait"
        yield Finding(NAME, State.OK, found + here)
    yield from _agents(settings, opening, since=record.since, now=now)


def _places(settings: Settings) -> Iterator[Finding]:
    """Regions in the URLs of the settings that do not fit."""
    table, arbiter = region_of(settings.store), region_of(settings.region_arbiter or "")
    if table is not None and table != settings.region and settings.region is not None:
        found = f"{PREFIX}REGION is {settings.region}, and the table of {PREFIX}STORE is in {table}"
        yield Finding(NAME, State.WRONG, found, "agents use the copy of their own region, and have its name")
    if arbiter is not None and arbiter == table:
        found = f"the arbiter is in {arbiter}, as the table is: it is lost with the region"
        yield Finding(NAME, State.WARNING, found, "make it in a third region (infra/control.yaml)")


def _agents(settings: Settings, opening: Callable[[str], Engine], *, since: float, now: float) -> Iterator[Finding]:
    """Agents that work without the grant of this arbiter: nothing keeps two of them from the same task."""
    if now - since < ANNOUNCED_S:
        return
    engine = opening(settings.store)
    try:
        agents = TaskStore(engine).agents(most=1000)
    except StoreError:
        return  # the checks of the store say so
    finally:
        engine.close()
    blind = [agent.name for agent in agents if not isinstance(agent.info.get("region"), dict)]
    if blind:
        found = f"there are agents that ask no arbiter and write without a grant ({len(blind)}), such as {blind[0]}"
        yield Finding(
            NAME, State.WRONG, found, f"stop them, and set {PREFIX}REGION_ARBITER and {PREFIX}REGION for them"
        )
    granted = sorted({str(agent.info["region"].get("name")) for agent in agents if _works(agent)})
    if len(granted) > 1:
        found = f"agents of {' and '.join(granted)} tell that their region has the grant"
        remedy = (
            f"stop those of all but one, and compare {PREFIX}REGION_ARBITER and {PREFIX}REGION_SCOPE: they must be the "
            "same everywhere, and the arbiter's table must not be replicated"
        )
        yield Finding(NAME, State.WRONG, found, remedy)


def _works(agent: AgentInfo) -> bool:
    region = agent.info.get("region")
    return isinstance(region, dict) and region.get("state") in ("granted", "draining")


def _remedy() -> str:
    return f"look at the table of {PREFIX}REGION_ARBITER, and at the policy: thunderagent iam agent"
