"""Commands for agents in several regions: region status, failover, failback, stay, freeze, thaw."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from thunderagent.cli.output import JsonOption, errors, moment, notes, out, tell
from thunderagent.model.errors import ConfigurationError, NotAllowed, StoreError
from thunderagent.regions.commands import Regions
from thunderagent.regions.grant import TAKER_SHARE, Record, RegionState
from thunderagent.settings import Settings, load_settings
from thunderagent.stores import open_store
from thunderagent.stores.tasks import AgentInfo

ArbiterOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Store, instead of THUNDERAGENT_REGION_ARBITER.", show_default=False),
]
ScopeOption = Annotated[
    str | None, typer.Option(help="Name of the row, instead of THUNDERAGENT_REGION_SCOPE.", show_default=False)
]
ReasonOption = Annotated[str, typer.Option(help="Shown with the grant.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
UnseenOption = Annotated[
    bool, typer.Option("--unseen", help="Also to a region without a live agent in the table of tasks.")
]
LATE_S = 15.0
"""Seconds without the new holder after which the command warns: agents look every five seconds."""

regions_app = typer.Typer(
    name="region",
    help="Show and move the grant of regions that share a global table.",
    no_args_is_help=True,
)


@contextmanager
def _orders(arbiter: str | None, scope: str | None) -> Iterator[tuple[Regions, Settings]]:
    region = os.environ.get("THUNDERAGENT_REGION") or "anywhere"  # the caller may be in no region
    settings = load_settings(region_arbiter=arbiter, region_scope=scope, region=region)
    regions = Regions.from_settings(settings)
    try:
        yield regions, settings
    finally:
        regions.engine.close()


@regions_app.command()
def status(arbiter: ArbiterOption = None, scope: ScopeOption = None, as_json: JsonOption = False) -> None:
    """Show which region has the grant, since when and why, and the agents with their regions."""
    with errors(), _orders(arbiter, scope) as (regions, settings):
        record, now = regions.status(), regions.engine.clock.now()
        agents, problem = _agents(settings)
        if as_json:
            data = None if record is None else {**asdict(record), "age_s": round(now - record.updated_at, 1)}
            seen = [{"agent": one.name, **one.info["region"]} for one in agents]
            tell({"scope": regions.scope, "record": data, "agents": seen, "problem": problem}, True)
            return
        if record is None:
            out.print(escape(f"no region was granted anything in the scope {regions.scope!r} yet"), soft_wrap=True)
        else:
            for line in _story(record, now):
                out.print(line, soft_wrap=True)
        for one in agents:
            region = one.info["region"]
            text = f"  agent {one.name}: {region.get('name')}, {region.get('state')}, epoch {region.get('epoch')}"
            out.print(escape(text), soft_wrap=True)
        if problem:
            notes.print(escape(f"the agents are not shown: {problem}"), style="yellow", soft_wrap=True)


@regions_app.command()
def failover(
    to: Annotated[str, typer.Option(help="The region that gets the grant, such as eu-west-1.")],
    force: Annotated[bool, typer.Option("--force", help="The holder does not answer: do not wait for it.")] = False,
    unseen: UnseenOption = False,
    reason: ReasonOption = "ordered",
    yes: YesOption = False,
    arbiter: ArbiterOption = None,
    scope: ScopeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the grant to another region.

    In order: the agents that have it claim nothing more, end or give back what they hold, and hand over after about
    80 s. With --force they stop when they see it, and the other region begins when every grant has expired (35 s).
    No other region takes the grant then, so it goes to no region without a live agent.
    """
    with errors(), _orders(arbiter, scope) as (regions, settings):
        _look_for_agents(to, settings, unseen)
        _doubt(settings, to)
        _ask(f"Move the grant of {regions.scope} to {to}{', by force' if force else ''}?", yes, as_json)
        if force:
            record = regions.force(to, reason=reason)
        else:
            record = regions.failover(to, drain_s=settings.drain_s, reason=reason)
        _tell(record, as_json)


@regions_app.command()
def failback(
    reason: ReasonOption = "ordered: back to the preferred region",
    to: Annotated[
        str | None, typer.Option(help="Instead of THUNDERAGENT_REGION_PREFERRED.", show_default=False)
    ] = None,
    unseen: UnseenOption = False,
    yes: YesOption = False,
    arbiter: ArbiterOption = None,
    scope: ScopeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the grant back to the preferred region, in order."""
    with errors(), _orders(arbiter, scope) as (regions, settings):
        wanted = to or settings.region_preferred
        if wanted is None:
            raise ConfigurationError("no region is preferred: name one with --to or in THUNDERAGENT_REGION_PREFERRED")
        _look_for_agents(wanted, settings, unseen)
        _doubt(settings, wanted)
        _ask(f"Move the grant of {regions.scope} back to {wanted}?", yes, as_json)
        _tell(regions.failover(wanted, drain_s=settings.drain_s, reason=reason), as_json)


@regions_app.command()
def stay(
    reason: ReasonOption = "the move is taken back",
    arbiter: ArbiterOption = None,
    scope: ScopeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take back an orderly move that has not ended yet."""
    with errors(), _orders(arbiter, scope) as (regions, _):
        _tell(regions.stay(reason=reason), as_json)


@regions_app.command()
def freeze(
    reason: ReasonOption = "ordered",
    arbiter: ArbiterOption = None,
    scope: ScopeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let no region take the grant by itself; commands still move it."""
    with errors(), _orders(arbiter, scope) as (regions, _):
        _tell(regions.freeze(reason), as_json)


@regions_app.command()
def thaw(arbiter: ArbiterOption = None, scope: ScopeOption = None, as_json: JsonOption = False) -> None:
    """Let regions take the grant by themselves again."""
    with errors(), _orders(arbiter, scope) as (regions, _):
        _tell(regions.thaw(), as_json)


def _look_for_agents(to: str, settings: Settings, unseen: bool) -> None:
    """Refuse a region without agents: after a typing error all agents would stand still."""
    agents, problem = _agents(settings)
    seen = sorted({str(one.info["region"].get("name")) for one in agents})
    if to in seen or unseen:
        return
    if seen:
        raise NotAllowed(
            f"no live agent is in the region {to!r}, and no other region would take the grant; agents are in "
            f"{', '.join(seen)}. Start some there first, or say --unseen if the table just does not show them"
        )
    why = f" ({problem})" if problem else ""
    notes.print(
        escape(f"no agent is seen in any region{why}: look whether {to!r} is the name of one with agents"),
        style="yellow",
        soft_wrap=True,
    )


def _agents(settings: Settings) -> tuple[list[AgentInfo], str | None]:
    """Agents in the table of the settings, and why it did not answer."""
    try:
        store = open_store(settings, for_agent=True)
        try:
            store.engine.check()
            return [one for one in store.agents(most=1000) if isinstance(one.info.get("region"), dict)], None
        finally:
            store.engine.close()
    except StoreError as error:
        return [], str(error)


def _doubt(settings: Settings, to: str) -> None:
    """Warn if no agent is seen that could use the grant there."""
    agents, problem = _agents(settings)
    there = [one.info["region"] for one in agents if one.info["region"].get("name") == to]
    if problem:
        why = f"whether agents of {to} are there is not known: {problem}"
    elif not there:
        why = f"no live agent is in {to}: it would have the grant and do nothing"
    elif not any(region.get("well", True) for region in there):
        why = f"no agent of {to} is well: they could not renew the grant, and would stop after seconds"
    else:
        return
    notes.print(escape(why), style="yellow", soft_wrap=True)


def _story(record: Record, now: float) -> Iterator[str]:
    yield f"[bold]{escape(record.holder)}[/bold] has the grant of {escape(record.scope)}, epoch {record.epoch}"
    yield escape(f"  since {moment(record.since)}: {record.reason}")
    age_s = now - record.updated_at
    is_old = age_s > record.lease_s * TAKER_SHARE
    is_vacant = record.state is RegionState.VACANT
    is_late = is_vacant and age_s > record.lease_s * TAKER_SHARE + LATE_S
    yield escape(f"  last sign {age_s:.0f} s ago, by {record.by or 'an agent'}; a grant lasts {record.lease_s:g} s") + (
        " [red](no agent there renews it)[/red]" if is_old and not is_vacant else ""
    )
    if record.state is RegionState.DRAINING:
        yield escape(f"  DRAINING: it goes to {record.to} when the agents have given back what they hold")
    elif is_vacant:
        yield escape(f"  VACANT: {record.to} takes it {record.lease_s * TAKER_SHARE:g} s after the order") + (
            " [red](it does not: are there agents, and are they well?)[/red]" if is_late else ""
        )
    if record.frozen is not None:
        yield "[yellow]  frozen:[/yellow] " + escape(f"{record.frozen}; end that with: thunderagent region thaw")


def _tell(record: Record, as_json: bool) -> None:
    if as_json:
        tell(asdict(record), True)
    else:
        for line in _story(record, record.updated_at):
            out.print(line, soft_wrap=True)


def _ask(question: str, yes: bool, as_json: bool) -> None:
    if not yes and not as_json and not typer.confirm(question, err=True):
        raise typer.Abort
