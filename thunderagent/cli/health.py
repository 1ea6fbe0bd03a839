"""The command health: whether agents are well, for scripts and for people."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from thunderagent.agent.health.file import read_files
from thunderagent.agent.health.judgement import SILENT_S
from thunderagent.cli.output import REFUSED, JsonOption, StoreOption, errors, opened, out, tell
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.names import names_of
from thunderagent.model.rows import as_map

if TYPE_CHECKING:
    from thunderagent.stores.tasks import AgentInfo

ASK_S: Final = 5.0
"""Seconds to wait for the answer of an agent at its port."""

LARGEST: Final = 1_000_000
"""Most bytes of that answer."""


def health(
    store: StoreOption = None,
    agent: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this agent, or the agents of this host.", show_default=False),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Read the files of THUNDERAGENT_HEALTH_FOLDER; needs no store.", show_default=False
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Ask one agent at its port, such as http://127.0.0.1:9464.", show_default=False
        ),
    ] = None,
    alive: Annotated[
        bool,
        typer.Option(
            "--alive",
            help="Ask whether they are alive, for what restarts agents: an agent without its store is alive. "
            "Needs --folder or --url.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show whether agents are healthy: exit code 0 if all are, else 1, also without any.

    Without options it reads the rows of the agents of this host. When the store may be away, use --folder or --url.
    """
    with errors():
        if folder is not None and url is not None:
            raise ConfigurationError("give --folder or --url, not both")
        if alive and folder is None and url is None:
            raise ConfigurationError("--alive needs --folder or --url: rows tell nothing while the store is away")
        if url is not None:
            found = [_asked(url)]
        elif folder is not None:
            found = read_files(folder, now=time.time())
        else:
            found = _rows(store, agent or socket.gethostname())
        if agent is not None:
            found = [one for one in found if agent in names_of(str(one["agent"]))]
        _show(found, as_json)
        good = "alive" if alive else "healthy"
        if not found or not all(one.get(good, one["healthy"]) for one in found):
            raise typer.Exit(REFUSED)


def _rows(store: str | None, name: str) -> list[dict[str, Any]]:
    """Agents by their rows: those of a host, or the one of that name."""
    with opened(store) as client:
        now = client.store.clock.now()
        return [_row(one, now) for one in client.agents.list() if name in names_of(one.name)]


def _row(agent: AgentInfo, now: float) -> dict[str, Any]:
    """Health by a row; a row that is not renewed is of an agent that is lost, or does not reach the store."""
    facts, seen_s = as_map(agent.info.get("health")), now - agent.seen_at
    reasons = list(said) if isinstance(said := facts.get("reasons"), (list, tuple)) else []
    if seen_s > SILENT_S:
        reasons = [f"its row was not renewed for {seen_s:.0f} s: it was killed, or it does not reach the store"]
    elif "healthy" not in facts and not (facts.get("heartbeat_alive") and facts.get("store_answers")):
        reasons = ["its heartbeat has died, or the store does not answer it"]
    kept = {name: facts[name] for name in ("alive", "state", "notes") if name in facts}
    return {
        "agent": agent.name,
        **kept,
        "healthy": not reasons and bool(facts.get("healthy", True)),
        "reasons": reasons,
        "seen_s": round(seen_s, 1),
    }


def _asked(url: str) -> dict[str, Any]:
    """The answer of the agent at a URL; without an answer it is not healthy."""
    whole = url.rstrip("/").removesuffix("/health") + "/health"
    if not whole.startswith(("http://", "https://")):
        raise ConfigurationError(f"--url is {url!r}; write for example http://127.0.0.1:9464")
    asker = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        try:
            with asker.open(whole, timeout=ASK_S) as reply:
                text = reply.read(LARGEST)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(LARGEST)
        facts = json.loads(text)
        return {**facts, "agent": str(facts["agent"]), "healthy": bool(facts["healthy"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{whole} does not answer as an agent does: {error}"
        return {"agent": whole, "healthy": False, "alive": False, "reasons": [reason]}


def _show(found: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        tell(found, True)
        return
    for one in found:
        said = "; ".join([*map(str, one.get("reasons", ())), *map(str, one.get("notes", ()))])
        state = "[green]healthy[/green]" if one["healthy"] else "[red]not healthy[/red]"
        out.print(f"{escape(str(one['agent']))} {state}" + (f": {escape(said)}" if said else ""), soft_wrap=True)
    if not found:
        out.print("no agent", soft_wrap=True)
