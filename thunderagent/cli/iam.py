"""Command that prints what AWS must allow."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from thunderagent.cli.output import JsonOption, StoreOption, errors
from thunderagent.ops.iam import Role, policy, resources
from thunderagent.settings import load_settings


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
    """Print the least AWS policy for a role, as JSON, for the table, queue, bucket and namespace of the settings."""
    with errors():
        found = resources(load_settings(store=store), account=account, region=region, partition=partition)
        typer.echo(json.dumps(policy(role, found), indent=None if as_json else 2))
