"""Commands on the store: table create, check, delete, the local engine, and what AWS must allow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from thunderagent.cli.output import REFUSED, JsonOption, StoreOption, errors, notes, out, tell
from thunderagent.model.errors import ConfigurationError
from thunderagent.ops import local_engine
from thunderagent.ops.iam import Role, policy, resources
from thunderagent.settings import load_settings
from thunderagent.stores import open_engine

if TYPE_CHECKING:  # boto3 takes a tenth of a second to import, and most commands need it for nothing
    from thunderagent.stores.dynamo.engine import DynamoEngine

table_app = typer.Typer(help="Create, check or delete the table of a DynamoDB store.", no_args_is_help=True)


@table_app.command("create")
def table_create(
    store: StoreOption = None,
    deletion_protection: Annotated[bool, typer.Option(help="Refuse to delete the table until this is off.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create the table with its index, time to live and point-in-time recovery; harmless when it exists."""
    from thunderagent.stores.dynamo.table import create_table

    with errors():
        engine = _dynamo(store)
        left = create_table(engine, deletion_protection=deletion_protection, progress=notes.print)
        if as_json:
            tell({"store": engine.url, "ready": True, "differences": [asdict(one) for one in left]}, True)
        else:
            out.print(f"the table of {engine.url} is ready", soft_wrap=True)


@table_app.command("check")
def table_check(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Compare the table with what it should be; every difference is named with its remedy."""
    from thunderagent.stores.dynamo.table import check_table

    with errors():
        engine = _dynamo(store)
        found = check_table(engine)
        if as_json:
            tell([asdict(one) for one in found], True)
        else:
            for one in found:
                out.print(
                    f"[{'yellow' if one.is_warning else 'red'}]{escape(one.what)}[/]\n  {escape(one.remedy)}",
                    soft_wrap=True,
                )
            if not found:
                out.print(f"the table of {engine.url} is as it should be", soft_wrap=True)
        if any(not one.is_warning for one in found):
            raise typer.Exit(REFUSED)


@table_app.command("delete")
def table_delete(
    store: StoreOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the table with all tasks."""
    with errors():
        engine = _dynamo(store)
        if not yes:
            typer.confirm(f"Delete the table of {engine.url} with all its tasks?", abort=True, err=as_json)
        from thunderagent.stores.dynamo.table import delete_table

        delete_table(engine)
        if as_json:
            tell({"store": engine.url, "deleted": True}, True)
        else:
            out.print(f"the table of {engine.url} is deleted", soft_wrap=True)


def local(
    stop: Annotated[bool, typer.Option("--stop", help="Stop the engine; its tables are kept.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show whether it runs.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Loopback port; a free one if not given.", show_default=False)
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where its state is kept.")] = Path(".thunderagent/local"),
    as_json: JsonOption = False,
) -> None:
    """Start a local DynamoDB in the background and print the line to use it."""
    with errors():
        if stop:
            stopped = local_engine.stop(folder)
            tell({"stopped": stopped} if as_json else "stopped" if stopped else "it was not running", as_json)
            return
        running = local_engine.status(folder)
        if not status:
            running = local_engine.start(folder, port)
            from thunderagent.stores.dynamo.table import create_table

            create_table(_dynamo(running.url))
        if as_json:
            tell(_local_data(running), True)
        elif status:
            out.print(
                f"running as process {running.pid} with state in {running.folder}" if running else "not running",
                soft_wrap=True,
            )
        if running is None:
            raise typer.Exit(REFUSED)
        if not as_json:
            typer.echo(f"export THUNDERAGENT_STORE='{running.url}'")


def iam(
    role: Annotated[
        Role, typer.Argument(help="producer: an application; agent; operator: this command; doctor: its doctor --aws.")
    ],
    store: StoreOption = None,
    account: Annotated[
        str | None, typer.Option(help="Number of the AWS account; any if not given.", show_default=False)
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="Region, instead of that of the store's URL.", show_default=False)
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="aws, aws-cn or aws-us-gov; that of the region.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the least AWS policy for a role, as JSON, for the resources of the settings."""
    with errors():
        found = resources(load_settings(store=store), account=account, region=region, partition=partition)
        typer.echo(json.dumps(policy(role, found), indent=None if as_json else 2))


def _local_data(running: local_engine.LocalEngine | None) -> dict[str, Any]:
    if running is None:
        return {"running": False}
    return {"running": True, "store": running.url, "pid": running.pid, "folder": str(running.folder)}


def _dynamo(store: str | None) -> DynamoEngine:
    engine = open_engine(load_settings(store=store).store)
    from thunderagent.stores.dynamo.engine import DynamoEngine

    if not isinstance(engine, DynamoEngine):
        raise ConfigurationError(
            f"{engine.url} has no table to look after: SQLite makes its own. Use a dynamodb:// store"
        )
    return engine
