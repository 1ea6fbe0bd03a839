"""Versions of jobs: how they are named in the table, and what brings a payload up from one to the next."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.support.engine import settings
from thunderagent.agent.admission import Admission
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.periodic import periodic
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.versions import bring_up
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError, PayloadInvalid
from thunderagent.model.names import NEWEST, has_version, job_value, parse_job, plain_job, wanted_job
from thunderagent.model.schedules import Schedule, Tick, tick_task
from thunderagent.model.task import Status, Task
from thunderagent.model.ticks import every
from thunderagent.queue.doorbell.message import DoorbellMessage
from thunderagent.queue.limits.waitlist import candidate_of
from thunderagent.router.enqueue import Enqueue
from thunderagent.stores.tasks import Wanted
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.testing import make_lease, memory_store


class Month(BaseModel):
    """The payload of version 3."""

    year: int
    month: int


def split(data: dict[str, Any]) -> dict[str, Any]:
    year, month = data["month"].split("-")
    return {"year": int(year), "number": int(month)}


def rename(data: dict[str, Any]) -> dict[str, Any]:
    return {"year": data["year"], "month": data["number"]}


def build(ctx: Context, payload: Month) -> dict[str, int]:
    return payload.model_dump()


def report(version: int = 3, **options: Any) -> Job[Month]:
    options.setdefault("upcasters", {1: split, 2: rename})
    return job("report.build", version=version, **options)(build)


def refused(**options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        report(**options)
    return str(caught.value)


def a_task(**changes: Any) -> Task:
    values: dict[str, Any] = {"task_id": "a", "status": Status.PENDING, "created_at": 1.0, "submitted_at": 1.0}
    return Task(**{**values, "job": "report.build", **changes})


# Names in the table


@given(st.text(min_size=1).filter(lambda name: not has_version(name)), st.integers(1, NEWEST))
def test_name_and_version_come_back_from_the_table(name: str, version: int) -> None:
    value = job_value(name, version)
    assert (parse_job(value), plain_job(value)) == ((name, version), name)
    assert wanted_job(value) == (name, version)
    row = a_task(job=name, version=version).to_row()
    assert row["job"] == value
    assert (Task.from_row(row).job, Task.from_row(row).version) == (name, version)


@given(st.text(min_size=1))
def test_whatever_stands_in_a_row_is_left_as_it_is(value: str) -> None:
    row = {**a_task().to_row(), "job": value}
    assert Task.from_row(row).to_row() == row


def test_the_first_version_is_the_plain_name() -> None:
    assert (job_value("report.build", 1), job_value("report.build", 2)) == ("report.build", "report.build@2")


@pytest.mark.parametrize("text", ["a@0", "a@007", "@2", f"a@{NEWEST + 1}", "a@" + "9" * 5000, "a@2@3"])
def test_what_ends_like_a_version_and_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write name@2"):
        wanted_job(text)


@pytest.mark.parametrize("text", ["a@b", "a@", "@", "user@host", "a@2b", "a@²"])
def test_another_at_sign_is_a_part_of_the_name(text: str) -> None:
    assert wanted_job(text) == (text, 1)


# The options of a job


def test_a_job_takes_all_versions_to_which_its_upcasters_lead() -> None:
    assert report().job_values == ("report.build", "report.build@2", "report.build@3")
    assert report(upcasters={2: rename}).job_values == ("report.build@2", "report.build@3")
    assert report(upcasters={}).job_values == ("report.build@3",)
    assert report(1, upcasters={}).job_values == ("report.build",)
    assert report().job_value == "report.build@3"


def test_a_gap_in_the_upcasters_is_named() -> None:
    assert "upcasters has none from version 2 to 3" in refused(upcasters={1: split})
    assert "none from version 1" not in refused(version=5, upcasters={2: rename, 4: rename})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": 0}, "version is 0; use a whole number from 1"),
        ({"version": True}, "version is True"),
        ({"version": 2.0}, "version is 2.0"),
        ({"version": NEWEST + 1}, f"to {NEWEST}"),
        ({"upcasters": {3: rename}}, "upcasters has 3: its keys are the versions that are brought up, all below 3"),
        ({"upcasters": {"1": split, 2: rename}}, "upcasters has '1'"),
        ({"upcasters": {2: "rename"}}, "the upcaster from version 2 is 'rename'; use a plain function"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, Any], said: str) -> None:
    assert said in refused(**options)


def test_an_upcaster_is_no_coroutine_function() -> None:
    async def later(data: Any) -> Any:
        return data

    assert "use a plain function" in refused(version=2, upcasters={1: later})


def test_no_name_ends_in_a_version() -> None:
    with pytest.raises(ConfigurationError, match="must not end in a version: write version=2"):
        job("report.build@2")(build)


def test_a_stream_has_versions_too() -> None:
    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None: ...

    assert stream("ticker", version=2, upcasters={1: split})(follow).job_values == ("ticker", "ticker@2")


def test_a_registry_knows_its_jobs_by_name_and_by_what_stands_in_the_table() -> None:
    registry = Registry(report(), job("other")(build))
    assert list(registry) == ["report.build", "other"]
    assert registry.by_value["report.build@2"] is registry["report.build"] is registry.by_value["report.build"]
    assert "report.build@4" not in registry.by_value
    assert "report.build" not in Registry(report(upcasters={})).by_value


# Payloads


def test_a_payload_of_any_older_version_is_brought_up() -> None:
    one = report()
    wanted = Month(year=2026, month=7)
    assert one.load_payload('{"month":"2026-07"}', 1) == wanted
    assert one.load_payload('{"year":2026,"number":7}', 2) == wanted
    assert one.load_payload('{"year":2026,"month":7}', 3) == wanted
    assert one.load_payload('{"year":2026,"month":7}') == wanted


def test_a_payload_of_newer_code_is_not_guessed_at() -> None:
    with pytest.raises(PayloadInvalid, match="is one of version 4 of the job"):
        report().load_payload("{}", 4)


def test_a_lease_for_a_handler_is_of_the_version_of_its_job() -> None:
    task = make_lease(report(), Month(year=2026, month=7)).task
    assert (task.job_value, report().load_payload(task.payload_text, task.version).year) == ("report.build@3", 2026)


def test_a_version_without_an_upcaster_is_named() -> None:
    with pytest.raises(PayloadInvalid, match="has no upcaster from version 1"):
        report(upcasters={2: rename}).load_payload("{}", 1)


def test_a_failing_upcaster_is_named_with_its_place_and_without_the_payload() -> None:
    with pytest.raises(PayloadInvalid) as caught:
        report().load_payload('{"month":"very secret"}', 1)
    said = str(caught.value)
    assert said.startswith("the upcaster of 'report.build' from version 1 failed: ValueError at jobs/test_versions.py:")
    assert "secret" not in said


def test_an_upcaster_that_answers_with_no_json_data_is_named() -> None:
    with pytest.raises(PayloadInvalid, match="the payload of 'a', brought up from version 1, is not JSON data"):
        bring_up("{}", "a", since=1, version=2, upcasters={1: lambda data: {1, 2}})


def test_what_an_upcaster_makes_is_checked_like_any_payload() -> None:
    one = report(2, upcasters={1: lambda data: {"year": "no number", "month": 7}})
    with pytest.raises(PayloadInvalid, match="year: Input should be a valid integer"):
        one.load_payload("{}", 1)


# Beside the queue


def test_an_index_entry_tells_what_stands_in_the_table() -> None:
    assert candidate_of(a_task(version=2)).job == "report.build@2"


def test_of_the_page_what_has_no_slot_goes_into_its_line_whatever_the_version() -> None:
    """One write, where a claim, a refusal and a step back would take three."""
    store, one = memory_store(), report(limit=1)
    admission = Admission(store, Registry(one), settings(), EventBus(), rng=random.Random(0))
    put = [
        a_task(task_id=name, version=version, created_at=store.clock.now()) for name, version in (("a", 1), ("b", 3))
    ]
    store.enqueue(put)
    lease = make_lease(one, Month(year=2026, month=7))
    assert admission.refusals([lease]) == {}
    kept, is_more = admission.claimable([Wanted(candidate_of(task), 60.0) for task in put])
    assert (kept, is_more) == ([], True)
    assert {task.waitlist for task in store.get(["a", "b"]).values()} == {"report.build"}


def test_a_ring_tells_what_stands_in_the_table() -> None:
    task = a_task(version=2)
    assert DoorbellMessage.task(task).job == "report.build@2"
    assert DoorbellMessage.task(DoorbellMessage.task(task).candidate) == DoorbellMessage.task(task)


def test_a_schedule_tells_the_version_of_its_payload() -> None:
    @periodic(every(10).minutes, payload=Month(year=2026, month=7))
    @job("report.build", version=3, upcasters={1: split, 2: rename})
    def periodic_build(ctx: Context, payload: Month) -> None: ...

    schedule = periodic_build.schedule
    assert schedule is not None
    assert Schedule.from_data(json.loads(json.dumps(schedule.to_data()))) == schedule
    task = tick_task("report.build", schedule, 600, shards=1, now=600.0)
    assert (task.task_id, task.job_value) == ("report.build@1970-01-01T00:10:00Z", "report.build@3")


def test_the_schedule_of_a_first_version_is_written_as_before() -> None:
    @periodic(every(10).minutes)
    @job("report.build")
    def periodic_build(ctx: Context, payload: Tick) -> None: ...

    assert periodic_build.schedule is not None
    assert "version" not in periodic_build.schedule.to_data()


def test_ids_of_routed_tasks_are_the_same_before_and_after_a_deploy() -> None:
    assert Enqueue("report.build@2", {}).name == Enqueue(report(), Month(year=2026, month=7)).name == "report.build"
