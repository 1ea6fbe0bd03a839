"""`scripts/deploy` and `scripts/destroy`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deployment.artefacts import check_source
from deployment.cloud import Cloud, open_cloud
from deployment.code import Code
from deployment.deploying import Declined, Deployment
from deployment.destroying import Destruction
from deployment.errors import DeploymentError, WrongOption
from deployment.local import running_engine, start_engine
from deployment.plan import ROOT, STACKS, chosen
from deployment.values import given
from thunderagent.model.errors import ThunderAgentError
from thunderagent.ops.local_engine import FOLDER

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")

_PREFIX_WORDS = "letters, digits and dashes, a letter first, 20 at most"

Local = Annotated[bool, typer.Option("--local", help="On an engine of this machine, which needs no account.")]
LocalFolder = Annotated[Path, typer.Option(help="Folder of the local engine.", show_default=False)]
Region = Annotated[str | None, typer.Option(help="Region; that of the environment.", show_default=False)]
Prefix = Annotated[str, typer.Option(help=f"Begins the names of the stacks: {_PREFIX_WORDS}.")]
StackNames = Annotated[
    list[str] | None,
    typer.Option(
        "--stack", help=f"Only this one of {', '.join(one.name for one in STACKS)}; may be given several times."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command()
def deploy(
    local: Local = False,
    region: Region = None,
    prefix: Prefix = "thunderagent",
    stack: StackNames = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for every stack that has it, or STACK.NAME=VALUE; may be given several times."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="Folder of the project with your jobs. It stays until you give another.", show_default=False),
    ] = None,
    code: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with your router for the function of the doorbell; may be given several times. It stays too.",
        ),
    ] = None,
    builtin: Annotated[
        bool, typer.Option("--builtin", help="ThunderAgent's own jobs and router in place of yours.")
    ] = False,
    bucket: Annotated[
        str | None, typer.Option(help="Bucket for new code; the stack's, or one is made.", show_default=False)
    ] = None,
    revert_drift: Annotated[
        bool, typer.Option("--revert-drift", help="Put back what was changed or deleted by hand too.")
    ] = False,
    yes: Yes = False,
    local_folder: LocalFolder = ROOT / FOLDER,
) -> None:
    """Make or update the stacks of infra/: shows what would change, asks, does it, and checks that all is there.

    Parameters and code that were given once stay. Exit codes: 0 done or nothing to change, 1 failed, 2 wrong options.

    Example: scripts/deploy --region eu-central-1 --source ~/shop --parameter Jobs=shop.jobs
    """
    console = Console()
    with _ending(console):
        _check(prefix)
        stacks, values = chosen(stack or []), given(parameter or [])
        if source is not None:
            check_source(source)
        endpoint = start_engine(str(local_folder)) if local else None
        with _open(region, endpoint) as cloud:
            what = Code(
                cloud=cloud,
                console=console,
                prefix=prefix,
                source=source,
                folders=code or (),
                bucket=bucket,
                is_builtin=builtin,
            )
            run = Deployment(
                cloud=cloud,
                console=console,
                prefix=prefix,
                agree=_asker(console, yes),
                code=what,
                revert_drift=revert_drift,
            )
            changed = run.run(stacks, values, every=STACKS)
            console.print(
                f"\n[green]{changed} of {len(stacks)} stacks changed.[/]" if changed else "\nNothing to change."
            )
            _tell_settings(console, run.outputs, endpoint)


@app.command()
def destroy(
    local: Local = False,
    region: Region = None,
    prefix: Prefix = "thunderagent",
    stack: StackNames = None,
    with_data: Annotated[
        bool, typer.Option("--with-data", help="Delete the tables too, with all that is in them.")
    ] = False,
    yes: Yes = False,
    local_folder: LocalFolder = ROOT / FOLDER,
) -> None:
    """Delete the stacks of infra/, the last first. Tables are kept; the next deploy takes them over.

    Exit codes: 0 done or nothing to do, 1 failed, 2 wrong options.

    Example: scripts/destroy --region eu-central-1 --stack agents
    """
    console = Console()
    with _ending(console):
        _check(prefix)
        stacks = chosen(stack or [])
        endpoint = running_engine(str(local_folder)) if local else None
        with _open(region, endpoint) as cloud:
            run = Destruction(
                cloud=cloud, console=console, prefix=prefix, agree=_asker(console, yes), with_data=with_data
            )
            number = run.run(stacks, is_all=not stack)
            console.print(f"\n[green]{number} stacks destroyed.[/]" if number else "")
            if local:
                stop = "" if local_folder == ROOT / FOLDER else f" --folder {local_folder}"
                console.print(
                    f"The local engine still runs; stop it with: .venv/bin/thunderagent local --stop{escape(stop)}",
                    highlight=False,
                    soft_wrap=True,
                )


def _tell_settings(console: Console, outputs: dict[str, str], endpoint: str | None) -> None:
    """What an application needs to use what was deployed."""
    suffix = f"&endpoint={endpoint}" if endpoint else ""
    if url := outputs.get("StoreUrl"):
        console.print(f"export THUNDERAGENT_STORE='{url}{suffix}'", highlight=False, soft_wrap=True)
    if url := outputs.get("WakeQueueUrl"):
        console.print(f"export THUNDERAGENT_WAKE_QUEUE_URL='{url}'", highlight=False, soft_wrap=True)
    if (url := outputs.get("PushEndpoint")) and (connections := outputs.get("ConnectionStore")):
        console.print(f"export THUNDERAGENT_PUSH_ENDPOINT='{url}'", highlight=False, soft_wrap=True)
        console.print(f"export THUNDERAGENT_PUSH_CONNECTIONS='{connections}{suffix}'", highlight=False, soft_wrap=True)


def _check(prefix: str) -> None:
    import re

    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,19}", prefix):
        raise typer.BadParameter(f"{prefix!r}: {_PREFIX_WORDS}", param_hint="--prefix")


def _asker(console: Console, yes: bool) -> Callable[[str], bool]:
    def ask(question: str) -> bool:
        if yes:
            return True
        if not sys.stdin.isatty():
            raise DeploymentError("nobody is here to be asked: look at what would change, and say --yes")
        return console.input(f"{question} \\[y/N] ").strip().lower() in ("y", "yes")

    return ask


@contextmanager
def _open(region: str | None, endpoint: str | None) -> Iterator[Cloud]:
    cloud = open_cloud(region, endpoint)
    try:
        yield cloud
    finally:
        cloud.close()


@contextmanager
def _ending(console: Console) -> Iterator[None]:
    """Errors become words and exit codes."""
    try:
        yield
    except Declined as declined:
        console.print(escape(str(declined)))
        raise typer.Exit(1) from None
    except ThunderAgentError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, WrongOption) else 1) from None
    except KeyboardInterrupt:
        console.print("\nstopped; what CloudFormation has begun goes on, run this again to follow it")
        raise typer.Exit(130) from None


def main() -> None:
    """Run the command that `scripts/deploy` and `scripts/destroy` name, under their name."""
    group = typer.main.get_group(app)
    name, *arguments = sys.argv[1:] or ["--help"]
    if command := group.commands.get(name):
        command(arguments, prog_name=f"scripts/{name}")
    else:
        app()


if __name__ == "__main__":
    main()
