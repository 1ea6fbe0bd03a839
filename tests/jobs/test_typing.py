"""A wrong payload is a type error before it is a failed task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from mypy import api

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]

PROGRAM: Final = """
from __future__ import annotations

from pydantic import BaseModel

from thunderagent import Client, Context, Snooze, job
from thunderagent.router import Enqueue, EventBridgeEvent, HttpRequest, Router, SnsRecord


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
    client.enqueue(build, Right(month="2026-07"), delay=5)  # wrong
    client.enqueue(build, Right(month="2026-07"), delay_s="5")  # wrong
    client.enqueue_many(build, [Right(month="2026-07")], unique_key="a")  # wrong


router = Router()


@router.eventbridge(source="shop", detail_type="MonthClosed")
def closed(detail: Right, event: EventBridgeEvent) -> Enqueue:
    return Enqueue(build, Right(month=detail.month), delay_s=5, unique_key=event.id)


@router.sns(topic="months")
def told(message: str, record: SnsRecord) -> list[Enqueue] | None:
    return [Enqueue("typed.build", {"month": message}), Enqueue(empty, None)] if message else None


@router.http("POST", "/months")
def posted(body: Right, request: HttpRequest) -> Enqueue:
    return Enqueue(build, Wrong(year=2026))  # wrong


@router.http("POST", "/years")
def by_name(body: Right, request: HttpRequest) -> Enqueue:
    return Enqueue("typed.build", body)  # wrong


@router.http("POST", "/days")  # wrong
def of_another_kind(body: Right, event: EventBridgeEvent) -> Enqueue:
    return Enqueue(build, body, delay="5")  # wrong


@router.sns(topic="years")  # wrong
def no_tasks(message: Right, record: SnsRecord) -> dict[str, str]:
    return {"month": message.month}
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
