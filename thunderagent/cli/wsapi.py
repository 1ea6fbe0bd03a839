"""The commands `wsapi`: the WebSocket API on this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from thunderagent.cli.output import JsonOption, errors, out
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import has_package, load_settings
from thunderagent.telemetry.logs import Telemetry, adopt_lines, configure_logging

if TYPE_CHECKING:  # an extra
    from thunderagent.websocket_api.gateway.local_regions import LocalRegion

DEMO_REGIONS = ("eu-central-1", "eu-west-1")
FIRST_PORT = 8765

wsapi_app = typer.Typer(help="The WebSocket API with durable state, on this machine.", no_args_is_help=True)


@wsapi_app.callback()
def _group() -> None:
    """The WebSocket API with durable state, on this machine."""


@wsapi_app.command("serve")
def serve(
    demo: Annotated[
        bool, typer.Option("--demo", help="Two regions, a page, and tokens for anyone on this machine.")
    ] = False,
    region: Annotated[
        list[str] | None, typer.Option(help="Name of a region; several times.", show_default=False)
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65000, help="First of two loopback ports for each region; 0: free ones.")
    ] = FIRST_PORT,
    folder: Annotated[Path, typer.Option(help="Where states and connections are kept.")] = Path(".thunderagent/wsapi"),
    as_json: JsonOption = False,
) -> None:
    """Serve the WebSocket API on this machine as API Gateway does, until Ctrl-C; it prints where.

    With --demo it makes a key, and its page gets tokens signed with it. Without, tokens are checked as in Lambda, by
    WSAPI_ISSUER, WSAPI_AUDIENCE, and WSAPI_JWKS_URL or WSAPI_JWKS.
    """
    with errors():
        if not has_package("jwt") or not has_package("cryptography"):
            raise ConfigurationError("the WebSocket API needs PyJWT: pip install 'thunderagent[wsapi]'")
        from thunderagent.websocket_api.gateway import local_regions
        from thunderagent.websocket_api.server.authorizer import Authorizer
        from thunderagent.websocket_api.server.settings import AuthorizerSettings, load, make_verifier

        settings = load_settings()
        configure_logging(settings.log_level, as_json=settings.log_json, redact=settings.log_redact)
        adopt_lines("websockets", "asyncio")
        bus = EventBus()
        Telemetry(bus)
        names = region or list(DEMO_REGIONS if demo else DEMO_REGIONS[:1])
        tokens = None if demo else load(AuthorizerSettings)
        with local_regions.local_regions(
            names,
            folder=folder,
            ports=[port + number if port else 0 for number in range(2 * len(names))],
            authorizer=Authorizer(make_verifier(tokens), query_token=tokens.query_token, bus=bus) if tokens else None,
            bus=bus,
        ) as regions:
            asyncio.run(local_regions.serve(regions, lambda: _tell(regions, demo=demo, as_json=as_json)))


def _tell(regions: Sequence[LocalRegion], *, demo: bool, as_json: bool) -> None:
    first = regions[0].gateway
    if as_json:
        data = [
            {
                "region": one.gateway.region,
                "url": one.gateway.url,
                "push_endpoint": one.gateway.push_endpoint,
                "push_connections": one.connections.url,
            }
            for one in regions
        ]
        typer.echo(json.dumps({"page": first.http_url if demo else None, "regions": data}))
        return
    for one in regions:
        out.print(f"{escape(one.gateway.region)} serves {one.gateway.url}", soft_wrap=True)
    if demo:
        out.print(f"demo page: {first.http_url}", soft_wrap=True)
        out.print(f"a token: curl '{first.http_url}token?user=ada'", soft_wrap=True)
    out.print("for ctx.push of agents on this machine:", soft_wrap=True)
    typer.echo(f"export THUNDERAGENT_PUSH_ENDPOINT='{first.push_endpoint}'")
    typer.echo(f"export THUNDERAGENT_PUSH_CONNECTIONS='{regions[0].connections.url}'")
