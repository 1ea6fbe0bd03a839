"""The command line with every command imported."""

from __future__ import annotations

from typing import Any

import typer

from thunderagent.cli import COMMANDS, app, command


def program() -> Any:
    """The program as a group of click; its commands are whole, not the sentences that its help needs."""
    group: Any = typer.main.get_command(app)
    group.commands = {name: command(name) for name in COMMANDS}
    return group
