"""The decorators of hooks: what they take, what they refuse, and how hooks are found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.test_logs import ABOUT
from thunderagent import JobRun, around, on
from thunderagent.jobs.context import Context
from thunderagent.jobs.hooks import EventHook, RunHook
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import Event
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.events import TaskEvent, TaskFailed, TaskRetried

FAILED = TaskFailed(**ABOUT, error="e")
RETRIED = TaskRetried(**ABOUT, error="e", delay_s=1.0)


def test_a_hook_of_events_stays_a_function_and_knows_what_it_wants() -> None:
    seen = []

    @on(TaskFailed)
    def note(event: TaskFailed) -> None:
        seen.append(event)

    note(FAILED)
    assert seen == [FAILED]
    assert note.name.endswith("note")
    assert note.wants(FAILED)
    assert not note.wants(RETRIED)


def test_a_class_of_events_stands_for_all_below_it_and_jobs_narrow_it() -> None:
    @on(TaskEvent, events.Polled, jobs=("test.job", "other"))
    def note(event: Event) -> None: ...

    @on(TaskEvent, jobs="other")  # type: ignore[arg-type] # a text is a sequence of letters, and meant as one name
    def other(event: Event) -> None: ...

    assert note.wants(FAILED)
    assert note.wants(RETRIED)
    assert not note.wants(events.Polled(queue="default", seen=1, tried=1, won=1)), "it is about no job"
    assert not other.wants(FAILED)


def test_a_hook_around_runs_can_be_written_with_and_without_parentheses() -> None:
    @around
    def plain(run: JobRun) -> Iterator[None]:
        yield

    @around(jobs=("a", "b"))
    def narrowed(run: JobRun) -> Iterator[None]:
        yield

    assert isinstance(plain, RunHook)
    assert plain.jobs is None
    assert narrowed.jobs == frozenset({"a", "b"})


def test_any_function_can_be_a_hook_and_has_a_name() -> None:
    class Counts:
        def __call__(self, event: Event) -> None: ...

    def surround(number: int, run: JobRun) -> Iterator[None]:
        yield

    assert on(TaskFailed)(Counts()).name == f"{__name__}.Counts"
    assert around(partial(surround, 1)).name.endswith("surround")
    assert on(TaskFailed)(partial(takes_two, None)).name == f"{__name__}.takes_two"
    assert on(TaskFailed)([].append).name


def no_event(event: object) -> None: ...


def takes_two(event: object, more: object) -> None: ...


async def is_async(event: object) -> None: ...


def yields(event: object) -> Iterator[None]:
    yield


async def yields_async(run: object) -> Any:
    yield


@pytest.mark.parametrize(
    ("decorate", "function", "problem"),
    [
        (on(), no_event, "at least one event"),
        (on(ValueError), no_event, "is no event"),  # type: ignore[arg-type]
        (on(FAILED), no_event, "is no event"),  # type: ignore[arg-type]
        (on(TaskFailed), takes_two, "one argument, the event"),
        (on(TaskFailed), is_async, "a plain function"),
        (on(TaskFailed), yields, "a plain function"),
        (around, no_event, "one `yield`"),
        (around(jobs=("a",)), is_async, "one `yield`"),
        (around, yields_async, "one `yield`"),
        (around, lambda: (yield), "one argument, the run"),
    ],
)
def test_a_function_that_cannot_be_a_hook_is_refused_with_the_reason(
    decorate: Any, function: Any, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        decorate(function)


MODULE = """
from thunderagent import around, job, on
from thunderagent.model.events import TaskFailed

@job("found.job")
def work(ctx, payload: dict) -> None: ...

@on(TaskFailed)
def note(event): ...

@around
def surround(run):
    yield
"""


def test_hooks_of_a_package_are_found_beside_its_jobs_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hookedjobs").mkdir()
    (tmp_path / "hookedjobs" / "__init__.py").write_text("from hookedjobs.work import note")
    (tmp_path / "hookedjobs" / "work.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        registry = Registry.from_package("hookedjobs")
    finally:
        for name in ("hookedjobs", "hookedjobs.work"):
            sys.modules.pop(name, None)
    assert list(registry) == ["found.job"]
    assert [type(hook) for hook in registry.hooks] == [EventHook, RunHook]


def test_hooks_can_be_given_in_code() -> None:
    @job("test.work")
    def work(ctx: Context, payload: dict[str, Any]) -> None: ...

    @on(TaskFailed)
    def note(event: TaskFailed) -> None: ...

    registry = Registry(work, note)
    registry.add(note)
    assert (len(registry), registry.hooks) == (1, (note,))


def test_a_hook_of_a_job_that_is_misspelt_is_refused_with_close_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "typedjobs.py").write_text(
        "from typing import Any\n"
        "from thunderagent import Context, job, on\n"
        "from thunderagent.model.events import TaskFailed\n"
        "@job('orders.ship')\n"
        "def ship(ctx: Context, payload: dict[str, Any]) -> None: ...\n"
        "@on(TaskFailed, jobs=('orders.shp', 'orders.ship', 'zzz'))\n"
        "def alarm(event: TaskFailed) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        Registry.from_package("typedjobs")
    assert str(caught.value).splitlines() == [
        "these hooks cannot work:",
        "  - typedjobs.alarm is about the job 'orders.shp', and no job is named so; did you mean 'orders.ship'?",
        "  - typedjobs.alarm is about the job 'zzz', and no job is named so",
    ]
