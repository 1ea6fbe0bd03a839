"""The demo believes nothing: its feed is the data, resumable at any place, and its check finds what is wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from thunderagent.model.task import Status, Task

SCRIPTS: Final = Path(__file__).parents[2] / "scripts"
FEED: Final = SCRIPTS / "demonstration" / "feed.py"
DONE: Final = Task(
    task_id="ticker-stocks",
    status=Status.DONE,
    done_reason="stopped",
    created_at=0.0,
    submitted_at=0.0,
    job="ticker.follow",
    last_seq={"seq": 12, "epoch": "e"},
)


@contextmanager
def feed(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The feed as a process, and its URL."""
    command = [sys.executable, str(FEED), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def take(url: str, number: int, **request: Any) -> list[dict[str, Any]]:
    """What the feed sends to a subscriber: the answer and so many ticks.

    The feed goes on while we leave, so its answer to our close may stand behind more than we read.
    """
    async with asyncio.timeout(20), connect(url, proxy=None, close_timeout=0.2) as connection:
        await connection.send(json.dumps({"op": "subscribe", "since": None, **request}))
        return [json.loads(await connection.recv()) for _ in range(number + 1)]


@pytest.mark.processes
def test_the_feed_can_be_resumed_at_any_place_and_ends_on_sigterm() -> None:
    with feed("--rate", "500") as (process, url):
        assert url.startswith("ws://127.0.0.1:")
        answer, *live = asyncio.run(take(url, 20))
        assert answer == {"op": "subscribed"}
        first = live[0]["seq"]
        assert [tick["seq"] for tick in live] == list(range(first, first + 20))
        again = asyncio.run(take(url, 18, since=first + 1, epoch=live[0]["epoch"]))
        assert again[1:] == live[2:], "what a number stands for is always the same"
        start = asyncio.run(take(url, 3, since=first, epoch="another life"))
        assert [tick["seq"] for tick in start[1:]] == [1, 2, 3]
        own = asyncio.run(take(url, 3, since=0, epoch=live[0]["epoch"], symbol="IBM"))
        assert [(tick["symbol"], tick["month"], tick["price"]) for tick in own[1:]] == [
            ("IBM", "2000-01", 100.52),
            ("IBM", "2000-02", 92.11),
            ("IBM", "2000-03", 106.11),
        ]
        with pytest.raises(ConnectionClosed, match="no subscription to a symbol"):
            asyncio.run(take(url, 1, symbol="NOBODY"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_rate_of_nothing_is_refused() -> None:
    done = subprocess.run([sys.executable, str(FEED), "--rate", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--rate must be over 0" in done.stderr


@pytest.fixture
def takeover(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of the demo that checks what the stream left."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import demonstration.takeover

    return demonstration.takeover


def write(folder: Path, ticks: list[dict[str, Any]]) -> None:
    for tick in ticks:
        with (folder / f"{tick['time'][:16].replace(':', '-')}.jsonl").open("a") as file:
            file.write(json.dumps(tick) + "\n")


def ticks(takeover: Any) -> list[dict[str, Any]]:
    """Ticks 3 to 12 as the feed sends them, over two minutes."""
    rows = takeover.prices()
    return [
        {"epoch": "e", "seq": seq, "time": f"2026-07-01T10:0{seq // 10}:{seq}Z", **rows[seq - 1]}
        for seq in range(3, 13)
    ]


def test_whole_files_pass(takeover: Any, tmp_path: Path) -> None:
    write(tmp_path, ticks(takeover))
    told = takeover.check(DONE, tmp_path, 20.0)
    assert (told.ticks, told.first, told.last, told.files, told.gaps, told.duplicates) == (10, 3, 12, 2, 0, 0)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda all: all[:4] + all[5:], "gaps=1, duplicates=0"),
        (lambda all: all[:5] + all[4:], "gaps=0, duplicates=1"),
        (lambda all: [all[1], all[0], *all[2:]], "in order"),
        (lambda all: [*all[:4], all[4] | {"price": 1.0}, *all[5:]], "not the feed's"),
        (lambda all: all[:-1], "the cursor is"),
    ],
    ids=["gap", "duplicate", "order", "price", "cursor"],
)
def test_files_with_a_damage_fail_the_demo(takeover: Any, tmp_path: Path, damage: Any, why: str) -> None:
    write(tmp_path, damage(ticks(takeover)))
    with pytest.raises(takeover.DemoFailed, match=why):
        takeover.check(DONE, tmp_path, 20.0)


def test_a_tick_in_the_file_of_another_minute_fails_the_demo(takeover: Any, tmp_path: Path) -> None:
    write(tmp_path, ticks(takeover))
    (tmp_path / "2026-07-01T10-01.jsonl").rename(tmp_path / "2026-07-01T10-02.jsonl")
    with pytest.raises(takeover.DemoFailed, match="wrong file"):
        takeover.check(DONE, tmp_path, 20.0)


def test_a_stream_that_was_not_stopped_fails_the_demo(takeover: Any, tmp_path: Path) -> None:
    write(tmp_path, ticks(takeover))
    with pytest.raises(takeover.DemoFailed, match="is FAILED: it broke"):
        takeover.check(replace(DONE, status=Status.FAILED, done_reason=None, error="it broke"), tmp_path, 20.0)
