"""An example for each command, which `--help` shows below the options and tests try."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from rich.markup import escape

PROGRAM: Final = "thunderagent"

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("thunderagent run jobs", "thunderagent explain report-2026-07"),
    "run": ("thunderagent run jobs --queue reports:4 --queue default:10",),
    "enqueue": (
        """thunderagent enqueue report.build '{"month": "2026-07"}' --task-id report-2026-07""",
        """thunderagent enqueue report.build '{"month": "2026-07"}' --jobs jobs --wait 60 --json""",
    ),
    "list": ("thunderagent list --status failed --queue reports",),
    "show": ("thunderagent show report-2026-07 --json",),
    "explain": ("thunderagent explain report-2026-07",),
    "retry": ("thunderagent retry report-2026-07",),
    "cancel": ("thunderagent cancel report-2026-07",),
    "purge": ("thunderagent purge success --older-than-days 7 --yes",),
    "pause": ("""thunderagent pause queue reports --for 2h --reason "database upgrade\"""",),
    "resume": ("thunderagent resume queue reports",),
    "pauses": ("thunderagent pauses --json",),
    "agents": ("thunderagent agents",),
    "agents drain": ("thunderagent agents drain host-1:4711:0a1b2c3d",),
    "stats": ("thunderagent stats --json",),
    "top": ("thunderagent top --every 5", "thunderagent top --once"),
    "doctor": (
        "thunderagent doctor jobs",
        "thunderagent doctor --supervisor-conf /opt/thunderagent/current/systemd/supervisord.conf --json",
        "thunderagent doctor --aws --region eu-central-1",
    ),
    "canary": ("thunderagent canary", "thunderagent canary --url wss://ws.example.com --token-from env:TOKEN --json"),
    "health": ("thunderagent health --folder /run/thunderagent/health",),
    "metrics": ("thunderagent metrics --json",),
    "dashboard": ("thunderagent dashboard --namespace ThunderAgent --region eu-central-1",),
    "iam": ("thunderagent iam agent --store 'dynamodb://TaskTable?region=eu-central-1' --account 123456789012",),
    "local": ("thunderagent local", "thunderagent local --status --json"),
    "region": ("thunderagent region status",),
    "region status": ("thunderagent region status --json",),
    "region failover": (
        """thunderagent region failover --to eu-west-1 --reason "game day\"""",
        "thunderagent region failover --to eu-west-1 --force --yes",
    ),
    "region failback": ("thunderagent region failback --to eu-central-1",),
    "region stay": ("thunderagent region stay",),
    "region freeze": ("""thunderagent region freeze --reason "network work\"""",),
    "region thaw": ("thunderagent region thaw",),
    "streams": ("thunderagent streams list",),
    "streams list": ("thunderagent streams list --status running",),
    "streams stop": ("thunderagent streams stop ticker-eurusd --wait 30",),
    "streams start": ("thunderagent streams start ticker-eurusd",),
    "streams explain": ("thunderagent streams explain ticker-eurusd --since 03:12",),
    "schedule": ("thunderagent schedule list",),
    "schedule list": ("thunderagent schedule list",),
    "schedule next": ("thunderagent schedule next report.monthly --number 3",),
    "schedule run-now": ("thunderagent schedule run-now report.monthly",),
    "schedule pause": ("thunderagent schedule pause report.monthly --for 2h",),
    "schedule resume": ("thunderagent schedule resume report.monthly",),
    "table": ("thunderagent table check",),
    "table create": ("thunderagent table create --store 'dynamodb://TaskTable?region=eu-central-1'",),
    "table check": ("thunderagent table check --json",),
    "table delete": ("thunderagent table delete --yes",),
    "wsapi": ("thunderagent wsapi serve --demo",),
    "wsapi serve": ("thunderagent wsapi serve --demo",),
}
"""By the words of the command; the empty word is the program itself."""


def add_examples(command: Any, words: str) -> None:
    """Add its examples to the help of a command, and of the commands of a group."""
    if lines := EXAMPLES.get(words):
        command.epilog = example_text(*lines)
    for name, one in getattr(command, "commands", {}).items():
        add_examples(one, f"{words} {name}")


def example_text(*lines: str) -> str:
    title = "Examples:" if len(lines) > 1 else "Example:"
    return "\n".join((title, *(f"$ {escape(line)}" for line in lines)))


def words_of(example: str) -> list[str]:
    """The arguments of an example, as a shell would give them to the program."""
    program, *arguments = shlex.split(example)
    assert program == PROGRAM, example
    return arguments
