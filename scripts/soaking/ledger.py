"""What was acknowledged, what ran when, what the rows say at the end, and what of it breaks a promise.

The rows are read without the package that is examined; moments are monotonic seconds.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import boto3

ENDED: Final = frozenset({"SUCCESS", "FAILED", "DONE"})
ATTRIBUTES: Final = ("taskId", "status", "job", "fence", "crashCount", "retryCount", "error")
SHOWN: Final = 10
"""Violations of a kind that are shown."""


@dataclass(slots=True)
class Run:
    """One run of a handler; without an end its process was killed."""

    fence: int
    begun: float
    pid: int
    ended: float | None = None
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A task whose enqueue was acknowledged.

    Attributes:
        job: its job.
        parents: tasks that must succeed before it.
        key: its unique key.
        end: the status that it must have at the end.
        purged: whether it may have been purged, once it had run.
        revived: whether it was retried by hand.
    """

    job: str
    parents: tuple[str, ...] = ()
    key: str = ""
    end: str = "SUCCESS"
    purged: bool = False
    revived: bool = False


@dataclass(slots=True)
class Ledger:
    """The runs by task, and the messages of each stream: fence, number and moment."""

    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[str, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, folder: Path, killed: Mapping[int, float]) -> Ledger:
        """The files of all processes. A run whose process was killed ended then; a half line is left out."""
        found = cls()
        for path in folder.glob("*.txt"):
            found._take(int(path.name.partition(".")[0]), path.read_text(encoding="utf-8"), killed)
        for runs in found.runs.values():
            runs.sort(key=lambda run: run.begun)
        for messages in found.messages.values():
            messages.sort()
        return found

    def _take(self, pid: int, text: str, killed: Mapping[int, float]) -> None:
        open_runs: dict[tuple[str, int], Run] = {}
        for line in text[: text.rfind("\n") + 1].splitlines():
            what, task_id, fence, *more, at = line.split()
            if what == "begin":
                run = Run(int(fence), float(at), pid)
                self.runs[task_id].append(run)
                open_runs[task_id, run.fence] = run
            elif what == "end":
                run = open_runs.pop((task_id, int(fence)))
                run.ended, run.how = float(at), more[0]
            else:
                self.messages[task_id].append((float(at), int(fence), int(more[0])))
        for run in open_runs.values():
            run.ended = killed.get(pid)


def rows(url: str) -> dict[str, dict[str, Any]]:
    """All rows of tasks by id, read with the database's own client."""
    if url.startswith("sqlite:///"):
        connection = sqlite3.connect(f"file:{url.removeprefix('sqlite:///')}?mode=ro", uri=True)
        names = ", ".join(f'"{name}"' for name in ATTRIBUTES)
        found = [
            dict(zip(ATTRIBUTES, row, strict=True))
            for row in connection.execute(f"SELECT {names} FROM tasks WHERE job IS NOT NULL")  # noqa: S608
        ]
        connection.close()
    else:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        client = boto3.client("dynamodb", region_name=options["region"][0], endpoint_url=options["endpoint"][0])
        pages = client.get_paginator("scan").paginate(TableName=parts.netloc, ConsistentRead=True)
        found = [
            {name: _plain(item[name]) for name in ATTRIBUTES if name in item}
            for page in pages
            for item in page["Items"]
            if "job" in item
        ]
    for row in found:
        row["status"] = str(row["status"]).partition("#")[0].partition("@")[0]
    return {row["taskId"]: row for row in found}


def _plain(value: Mapping[str, str]) -> str | int:
    [(kind, content)] = value.items()
    return int(float(content)) if kind == "N" else content


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, and by what."""

    promise: str
    task_id: str
    text: str


def judge(
    asked: Mapping[str, Asked], ledger: Ledger, table: Mapping[str, Mapping[str, Any]], *, limit: int
) -> list[Violation]:
    """Every broken promise.

    Args:
        asked: the tasks whose enqueue was acknowledged, by id.
        ledger: what ran.
        table: the rows at the end.
        limit: tasks of `soak.limited` that may run at once.
    """
    return [
        *_lost_or_stuck(asked, ledger, table),
        *_twice(ledger, table, asked),
        *_parents(asked, ledger),
        *_together(
            "the limit is exceeded",
            [(name, run) for name, one in asked.items() if one.job == "soak.limited" for run in ledger.runs[name]],
            limit,
        ),
        *_keys(asked, ledger),
        *_streams(ledger),
    ]


def _lost_or_stuck(
    asked: Mapping[str, Asked], ledger: Ledger, table: Mapping[str, Mapping[str, Any]]
) -> Iterable[Violation]:
    for name, one in asked.items():
        row, runs = table.get(name), ledger.runs.get(name, [])
        if row is None:
            if not one.purged or not any(run.how == "ok" for run in runs):
                yield Violation("an acknowledged task is lost", name, f"{one.job}: no row, {len(runs)} runs")
        elif row["status"] not in ENDED:
            yield Violation("a task is stuck", name, f"{one.job}: {row['status']}, fence {row.get('fence')}")
        elif row["status"] != one.end:
            why = f"{one.job}: {row['status']} instead of {one.end}: {row.get('error')}"
            yield Violation("a task ended otherwise than its handler did", name, why)
        elif one.end == "SUCCESS" and not any(run.how == "ok" for run in runs):
            yield Violation("a task succeeded that no handler has run to its end", name, f"{one.job}: {runs}")
        elif one.end == "DONE" and runs:
            yield Violation("a task ran that was cancelled before", name, f"{one.job}: {runs}")
    for name, row in table.items():
        if name not in asked and row["status"] not in ENDED and not name.startswith("soak.tick@"):
            yield Violation("a task is stuck", name, f"nobody asked for it: {row['job']} {row['status']}")


def _twice(ledger: Ledger, table: Mapping[str, Mapping[str, Any]], asked: Mapping[str, Asked]) -> Iterable[Violation]:
    for name, runs in ledger.runs.items():
        row, one = table.get(name), asked.get(name)
        # Streams that are not exclusive are handed over while they run; their messages are judged one by one.
        may_overlap = row is not None and row["job"] == "soak.stream"
        for before, after in pairwise(runs):
            if after.fence <= before.fence:
                text = f"fence {before.fence} at {before.begun:.3f} by {before.pid}, then {after}"
                yield Violation("a task ran twice under one fence", name, text)
            elif before.ended is not None and before.ended > after.begun and not may_overlap:
                yield Violation("two runs of a task overlap", name, f"{before}, {after}")
        if row is None or one is None or one.revived or one.job == "soak.stream":
            continue
        unexplained = sum(run.how in ("", "ok", "LeaseLost") for run in runs[:-1]) if one.job != "soak.snooze" else 0
        if unexplained > (row.get("crashCount") or 0):
            text = f"{one.job}: {runs}, but crashCount is {row.get('crashCount')}"
            yield Violation("a second run does not show in its row", name, text)


def _parents(asked: Mapping[str, Asked], ledger: Ledger) -> Iterable[Violation]:
    for name, one in asked.items():
        for parent in one.parents:
            ends = [run.ended for run in ledger.runs.get(parent, []) if run.how == "ok" and run.ended is not None]
            runs = ledger.runs.get(name, [])
            if runs and (not ends or min(ends) > runs[0].begun):
                yield Violation("a child ran before its parent had succeeded", name, f"the parent is {parent}")


def _keys(asked: Mapping[str, Asked], ledger: Ledger) -> Iterable[Violation]:
    by_key: dict[str, list[tuple[str, Run]]] = defaultdict(list)
    for name, one in asked.items():
        if one.key:
            by_key[one.key] += [(name, run) for run in ledger.runs.get(name, [])]
    for runs in by_key.values():
        yield from _together("two tasks of a unique key ran at once", runs, 1)


def _together(promise: str, runs: Sequence[tuple[str, Run]], most: int) -> Iterable[Violation]:
    moments = [(run.begun, 1, name) for name, run in runs]
    moments += [(run.ended, -1, name) for name, run in runs if run.ended is not None]
    number = 0
    for at, change, name in sorted(moments, key=lambda one: one[:2]):
        number += change
        if number > most:
            yield Violation(promise, name, f"{number} at {at:.3f}, at most {most}")


def _streams(ledger: Ledger) -> Iterable[Violation]:
    for name, messages in ledger.messages.items():
        newest = 0
        for at, fence, seq in messages:
            if fence < newest:
                yield Violation("a stream was handled by a run that was over", name, f"{seq} under {fence} at {at:.3f}")
            newest = max(newest, fence)
        seen = {seq for _, _, seq in messages}
        if missing := set(range(min(seen), max(seen) + 1)) - seen:
            yield Violation("a stream has a gap", name, f"{len(missing)} messages, the first is {min(missing)}")
