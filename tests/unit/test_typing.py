"""A wrong payload is a type error before it is a failed task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mypy import api

ROOT: Final = Path(__file__).parents[2]

PROGRAM: Final = """
from __future__ import annotations

from pydantic import BaseModel

from thunderagent import Client, Context, Snooze, job


class Right(BaseModel):
    month: str


class Wrong(BaseModel):
    year: int


@job("typed.build")
def build(ctx: Context, payload: Right) -> dict[str, int] | Snooze:
    return {"letters": len(payload.month)}


@job("typed.empty")
async def empty(ctx: Context, payload: None) -> None: ...


def use(client: Client) -> None:
    client.enqueue(build, Right(month="2026-07"), task_id="a", delay_s=1)
    client.enqueue("typed.build", {"month": "2026-07"})
    client.enqueue("typed.build")
    client.enqueue(empty, None)
    client.enqueue_many(build, [Right(month="2026-07")])
    client.enqueue(build, Wrong(year=2026))  # wrong
    client.enqueue(build, None)  # wrong
    client.enqueue(build, "2026-07")  # wrong
    client.enqueue(empty, Right(month="2026-07"))  # wrong
    client.enqueue_many(build, [Wrong(year=2026)])  # wrong
    client.enqueue("typed.build", Right(month="2026-07"))  # wrong
"""


def test_mypy_refuses_the_wrong_payload_and_accepts_the_right_ones(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    out, err, code = api.run(
        [
            "--strict",
            "--config-file",
            str(ROOT / "setup.cfg"),
            "--no-error-summary",
            "--hide-error-context",
            "--cache-dir",
            str(ROOT / ".mypy_cache" / "typing"),
            str(program),
        ]
    )
    assert err == ""
    expected = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert {int(line) for line in re.findall(r"program\.py:(\d+)(?::\d+)?: error", out)} == expected, out
    assert code == 1
