"""The command `canary`: one attempt at each target, with the time of each step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.markup import escape

from thunderagent.cli.output import REFUSED, JsonOption, errors, make_table, out, tell
from thunderagent.model.canary_targets import target_problems
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import load_settings
from thunderagent.websocket_api.canary.making import make_prober
from thunderagent.websocket_api.canary.probe import ProbeResult

GIVEN = "given"
"""Name of the target of `--url`."""


def canary(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Names in THUNDERAGENT_CANARY_TARGETS; all if none is given."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Try this URL instead, such as wss://ws.example.com.", show_default=False),
    ] = None,
    token_from: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Token, instead of THUNDERAGENT_CANARY_TOKEN_FROM: env:NAME, …", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Try WebSocket APIs once: connect, authenticate, ping, setState, getState, close.

    Exit code 0 if every step did, 1 if one failed; it is named with the reason. Each target has ten seconds.
    """
    with errors():
        settings = load_settings(canary_token_from=token_from)
        wanted = _wanted(targets or [], url, settings.canary_targets)
        prober = make_prober(settings, f"command {os.getpid()}")
        results = asyncio.run(prober.probe_all(wanted))
        if as_json:
            tell([{"observer": prober.observer, **result.as_data()} for result in results], True)
        else:
            _show(results, wanted)
        if not all(result.ok for result in results):
            raise typer.Exit(REFUSED)


def _wanted(names: Sequence[str], url: str | None, known: Mapping[str, str]) -> dict[str, str]:
    if url is not None:
        if names:
            raise ConfigurationError("give names of targets or --url, not both")
        if problems := list(target_problems({GIVEN: url})):
            raise ConfigurationError(f"--url {'; '.join(problems)}")
        return {GIVEN: url}
    if not known:
        raise ConfigurationError(
            'there is no target: set THUNDERAGENT_CANARY_TARGETS, such as {"eu-central-1": "wss://ws.example.com"}, '
            "or give --url"
        )
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"no target is named {', '.join(map(repr, unknown))}; known are: {', '.join(known)}")
    return {name: known[name] for name in names or known}


def _show(results: Sequence[ProbeResult], urls: Mapping[str, str]) -> None:
    for result in results:
        state = "[green]ok[/green]" if result.ok else "[red]failed[/red]"
        if result.unjudged:
            state = f"[yellow]cannot be judged ({result.unjudged})[/yellow]"
        region = f", answered by {escape(result.region)}" if result.region and result.region != result.target else ""
        head = f"{result.target} {state} in {result.seconds * 1000:.0f} ms{region}"
        out.print(f"{head} [dim]{escape(urls[result.target])}[/dim]", soft_wrap=True)
        table = make_table("step", "ms", ids=map(str, result.steps))
        table.columns[1].justify = "right"
        for step, seconds in result.steps.items():
            mark = "  [red]failed[/red]" if step is result.failed else ""
            table.add_row(str(step), f"{seconds * 1000:.1f}{mark}")
        out.print(table)
        if not result.ok:
            out.print(f"[red]{result.failed}:[/red] {escape(result.reason)}", soft_wrap=True)
