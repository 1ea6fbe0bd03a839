"""The command doctor: checks what agents need here, with the remedy for what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from thunderagent.cli.output import REFUSED, STORE, JsonOption, StoreOption, errors, find_here, notes, out, tell
from thunderagent.model.errors import ConfigurationError
from thunderagent.ops.doctor.checks import Doctor
from thunderagent.ops.doctor.findings import Finding, State, worst

_SIGNS: Final = {
    State.OK: "[green]ok[/green]",
    State.WARNING: "[yellow]warning[/yellow]",
    State.WRONG: "[red]wrong[/red]",
    State.UNKNOWN: "[yellow]unknown[/yellow]",
    State.SKIPPED: "[dim]skipped[/dim]",
}
_WIDTH: Final = 7


def doctor(
    jobs: Annotated[
        str | None, typer.Argument(help="Package whose jobs are checked too, for example: jobs", show_default=False)
    ] = None,
    supervisor_conf: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="supervisord.conf to read, instead of the running or installed one.",
            show_default=False,
        ),
    ] = None,
    aws: Annotated[
        bool, typer.Option("--aws", help="Compare the deployed stacks with the account instead; reads only.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(help="With --aws: prefix of the stacks; thunderagent.", show_default=False),
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="With --aws: region; that of the store or environment.", show_default=False)
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check settings, store, permissions, clock and supervisor, with remedies.

    Run it as the user and with the environment of the agents. It writes one row and deletes it. Exit code 0: agents
    can work, maybe with warnings; 1: something is wrong; 3: the store cannot be used.

    With --aws it compares the stacks of infra/ with the account: tables, alarms, logs, machines, functions,
    permissions, quotas. It needs the policy of `thunderagent iam doctor` and changes nothing. What it may not see is
    unknown. Exit code 0: nothing is wrong, 1: something is, 3: the account does not answer.
    """
    with errors():
        find_here()
        if aws and (jobs or supervisor_conf):
            raise ConfigurationError("--aws looks at the account alone: leave PACKAGE and --supervisor-conf out")
        if not aws and (prefix or region):
            raise ConfigurationError("--prefix and --region go with --aws")
        if aws:
            one: Doctor = _account(store, prefix or "thunderagent", region)
        else:
            one = Doctor(store=store, jobs=jobs, supervisor_conf=supervisor_conf)
        found: list[Finding] = []
        with _progress() as progress:
            for finding in one.examine(progress):
                found.append(finding)
                if not as_json:
                    _show(finding)
        code = STORE if not one.is_reachable else REFUSED if worst(found) is State.WRONG else 0
        if as_json:
            checks = [{**asdict(finding), "remedy": finding.remedy or None} for finding in found]
            tell(
                {"region" if aws else "store": one.url, "state": worst(found), "exit_code": code, "checks": checks},
                True,
            )
        else:
            _sum_up(found, one, is_account=aws)
        if code:
            raise typer.Exit(code)


def _account(store: str | None, prefix: str, region: str | None) -> Doctor:
    from thunderagent.ops.doctor.account import Account  # boto3 is slow to import
    from thunderagent.ops.doctor.stacks import LOOKS

    return Account(store, prefix=prefix, region=region, looks=LOOKS)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is checked, which may take seconds where something does not answer."""
    if not notes.is_terminal:
        yield lambda check: None
        return
    with notes.status("looking") as status:
        yield lambda check: status.update(f"checking: {check}")


def _show(finding: Finding) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_WIDTH)
    table.add_column(overflow="fold")
    text = f"{escape(finding.check)}: {escape(finding.found)}"
    table.add_row(_SIGNS[finding.state], f"[dim]{text}[/dim]" if finding.state is State.SKIPPED else text)
    if finding.remedy:
        table.add_row("", f"[dim]{'' if finding.state is State.SKIPPED else '-> '}{escape(finding.remedy)}[/dim]")
    out.print(table)


def _sum_up(found: list[Finding], one: Doctor, *, is_account: bool) -> None:
    counts = {state: len([finding for finding in found if finding.state is state]) for state in State}
    doubts = _warnings(counts[State.WARNING]) + (f", {counts[State.UNKNOWN]} unknown" if counts[State.UNKNOWN] else "")
    if not one.is_reachable:
        what = f"[red]the {'account in' if is_account else 'store'} {escape(one.url)} cannot be used[/red]"
    elif counts[State.WRONG]:
        what = f"[red]{counts[State.WRONG]} wrong[/red], {doubts}"
    elif counts[State.WARNING] or counts[State.UNKNOWN]:
        what = f"{'nothing is wrong' if is_account else 'agents can work'}; [yellow]{doubts}[/yellow]"
    else:
        what = "[green]all is well[/green]"
    out.print(f"\n{what}")


def _warnings(number: int) -> str:
    return "1 warning" if number == 1 else f"{number} warnings"
