"""Commands that pause and resume: pause, resume, pauses."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from thunderagent.cli.output import JsonOption, StoreOption, choice, errors, moment, notes, opened, out, tell
from thunderagent.model.errors import ConfigurationError
from thunderagent.ops.waiting import pause_text
from thunderagent.queue.pause_commands import doubt
from thunderagent.queue.pauses import Pause, PauseKind

KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="queue, job or agent.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Its name; for agents also their host.")]
LastsOption = Annotated[
    str | None,
    typer.Option("--for", metavar="TIME", help="End by itself after 90s, 15m, 2h, 1d.", show_default=False),
]
ReasonOption = Annotated[str | None, typer.Option(help="Shown with the pause.", show_default=False)]


def pause(
    kind: KindArgument,
    name: NameArgument,
    lasts: LastsOption = None,
    reason: ReasonOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let no task start of a queue, of a job or in an agent; what runs goes on.

    Agents see it within a second, or when they next look for work. Their tasks wait, streams stay connected, and
    enqueue works as before.
    """
    with errors(), opened(store) as client:
        named = _named(kind, name)
        for_s = None if lasts is None else duration("--for", lasts)
        found = client.pauses.pause(**named, for_s=for_s, reason=reason)
        if why := doubt(client.store, found):
            notes.print(escape(f"{why}; it is paused all the same"), style="yellow", soft_wrap=True)
        text = f"{_what(found)} is {pause_text(found, client.store.clock.now())}"
        tell(asdict(found) if as_json else text, as_json)


def resume(kind: KindArgument, name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """End a pause. Resuming what is not paused changes nothing."""
    with errors(), opened(store) as client:
        named = _named(kind, name)
        ended = client.pauses.resume(**named)
        if as_json:
            tell({"kind": kind, "name": name, "resumed": ended is not None}, True)
        elif ended is None:
            tell(f"{kind} {name} was not paused", False)
        else:
            since = "" if ended.since is None else f"; it was paused since {moment(ended.since)}"
            tell(f"{kind} {name} is resumed{since}", False)


def pauses(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List what is paused: since when, until when, and why."""
    with errors(), opened(store) as client:
        found, now = client.pauses.list(), client.store.clock.now()
        if as_json:
            tell([asdict(one) for one in found], True)
            return
        for one in found:
            out.print(escape(f"{_what(one)} is {pause_text(one, now)}"), soft_wrap=True)
        if not found:
            out.print("nothing is paused")


_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = r"(\d+(?:\.\d+)?)([smhd])"


def duration(option: str, text: str) -> float:
    """Seconds of a text such as 90s, 15m, 2h, 1d or 1h30m.

    Raises:
        ConfigurationError: it is none, or no time at all.
    """
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text))
    if not re.fullmatch(f"(?:{_PART})+", text, re.ASCII) or seconds <= 0:
        raise ConfigurationError(f"{option} {text}: write a time with its unit, for example 90s, 15m, 2h, 1d or 1h30m")
    return seconds


def _what(found: Pause) -> str:
    return f"{found.kind} {found.name}"


def _named(kind: str, name: str) -> dict[str, Any]:
    return {choice("KIND", kind, tuple(PauseKind)): name}
