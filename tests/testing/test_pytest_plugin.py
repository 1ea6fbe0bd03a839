"""The pytest plugin as users have it: each test here runs a small project of its own with it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import thunderagent
from tests.support.stands import eventually
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing.faulty_engine import VERBS, FaultyEngine

pytest_plugins = ["pytester"]

JOBS = """
from typing import Any

from thunderagent import Context, Tick, cron, job, periodic


@job("myjobs.add", max_retry=5)
def add(ctx: Context, payload: dict[str, int]) -> int:
    return sum(payload.values()) + sum(ctx.parent_results().values())


@job("myjobs.fails", max_retry=5)
def fails(ctx: Context, payload: dict[str, int]) -> int:
    if ctx.attempt <= payload["times"]:
        raise RuntimeError("not yet")
    return ctx.attempt


@periodic(cron("30 2 * * *", zone="Europe/Berlin"))
@job("myjobs.nightly")
def nightly(ctx: Context, payload: Tick) -> str:
    return payload.at.isoformat()
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with jobs; its tests treat warnings as errors."""
    pytester.makepyfile(myjobs=JOBS)
    pytester.makeini(
        "[pytest]\naddopts = --strict-markers -p no:cacheprovider\nfilterwarnings =\n    error\n"
        "    ignore:Module already imported:pytest.PytestAssertRewriteWarning\n"  # as it runs in our own process
    )
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setitem(sys.modules, "myjobs", None)
    del sys.modules["myjobs"]
    return pytester


def passes(project: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    """Run tests in this process; all pass, and no thread of theirs is left."""
    before = set(threading.enumerate())
    project.makepyfile(test_it=text)
    result = project.runpytest_inprocess(*options)
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}, "\n".join(result.outlines)
    eventually(lambda: not [thread for thread in threading.enumerate() if thread not in before])
    return result


@pytest.mark.slow
def test_a_client_has_a_store_of_its_own_in_each_test(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import pytest
        from myjobs import add

        @pytest.mark.parametrize("turn", [1, 2])
        def test_one(thunder_client, run_until_idle, turn):
            task = thunder_client.enqueue(add, {"a": turn}, task_id="same")
            child = thunder_client.enqueue(add, {"a": 1}, depends_on=[task])
            done = run_until_idle(add)
            assert thunder_client.get(child).result == turn + 1
            assert len(list(thunder_client.list())) == 2
        """,
    )


@pytest.mark.parametrize("how", ["marker", "ini", "fixture", "several"])
def test_jobs_are_named_by_a_marker_the_configuration_a_fixture_or_a_call(project: pytest.Pytester, how: str) -> None:
    marker = '@pytest.mark.thunder_jobs("myjobs")' if how == "marker" else ""
    options = ("-o", "thunder_jobs=myjobs") if how == "ini" else ()
    fixture = "@pytest.fixture\ndef thunder_jobs():\n    return 'myjobs'\n" if how == "fixture" else ""
    call = "run_until_idle([myjobs.fails, myjobs.add])" if how == "several" else "run_until_idle()"
    passes(
        project,
        f"import myjobs\nimport pytest\n{fixture}\n{marker}\n"
        "def test_it(thunder_client, run_until_idle):\n"
        "    task = thunder_client.enqueue('myjobs.add', {'a': 1})\n"
        f"    {call}\n"
        "    assert thunder_client.get(task).result == 1\n",
        *options,
    )


def test_without_jobs_it_says_where_to_name_them(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import pytest
        from thunderagent.model.errors import ConfigurationError

        def test_it(run_until_idle):
            with pytest.raises(ConfigurationError, match="there are no jobs to serve: call run_until_idle"):
                run_until_idle()

        def test_without_a_clock(run_until_idle):
            with pytest.raises(ConfigurationError, match="let the test ask for the fixture thunder_clock"):
                run_until_idle("myjobs", for_s=60)
        """,
    )


def test_time_jumps_to_what_is_due_next(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import time
        from myjobs import add, fails
        from thunderagent.model.events import TaskRetried

        def test_it(thunder_client, thunder_clock, thunder_events, run_until_idle):
            began, at = time.monotonic(), thunder_clock.now()
            later = thunder_client.enqueue(add, {"a": 1}, delay_s=7 * 86400)
            again = thunder_client.enqueue(fails, {"times": 3}, delay_s=3600)
            run_until_idle([add, fails])
            assert thunder_client.get(again).result == 4
            assert thunder_client.get(later).started_at == at + 7 * 86400
            delays = [one.delay_s for one in thunder_events.of(TaskRetried)]
            assert len(delays) == 3 and max(delays) > 0.05
            assert 7 * 86400 <= thunder_clock.now() - at < 7 * 86400 + 60
            assert time.monotonic() - began < 60
        """,
    )


def test_what_is_left_to_chance_is_the_same_in_each_run(project: pytest.Pytester) -> None:
    text = """
        from myjobs import fails
        from thunderagent.model.events import TaskRetried

        def test_it(thunder_client, thunder_clock, thunder_events, run_until_idle):
            thunder_client.enqueue(fails, {"times": 3})
            run_until_idle(fails)
            print("waits", [round(one.delay_s, 6) for one in thunder_events.of(TaskRetried)])
        """
    first, second = ([line for line in passes(project, text, "-s").outlines if "waits" in line] for _ in range(2))
    assert first == second != []


@pytest.mark.slow
def test_a_night_of_daylight_saving_passes_in_a_moment(project: pytest.Pytester) -> None:
    """On 2026-10-25 the clocks of Berlin go back at 03:00, so 02:30 is there twice; on 2027-03-28 not at all."""
    passes(
        project,
        """
        from datetime import UTC, datetime
        import pytest
        from myjobs import nightly
        from thunderagent.testing import FakeClock

        @pytest.fixture
        def thunder_clock():
            return FakeClock(datetime(2026, 10, 23, 12, tzinfo=UTC).timestamp())

        def test_it(thunder_client, thunder_clock, run_until_idle):
            run_until_idle(nightly, for_s=4 * 86400)
            ran = sorted(task.result for task in thunder_client.list(status="SUCCESS"))
            assert ran == [
                "2026-10-24T00:30:00+00:00",
                "2026-10-25T00:30:00+00:00",
                "2026-10-26T01:30:00+00:00",
                "2026-10-27T01:30:00+00:00",
            ]
            assert thunder_clock.now() == datetime(2026, 10, 27, 12, tzinfo=UTC).timestamp()
        """,
    )


@pytest.mark.slow
def test_faults_go_by_names_that_say_what_happens(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import pytest
        from myjobs import add
        from thunderagent import Context, job
        from thunderagent.model.errors import StoreUnavailable
        from thunderagent.model.events import StoreFailed, StoreRecovered
        from thunderagent.testing import Fault

        def test_faults(thunder_client, thunder_faults, thunder_events, run_until_idle):
            faults = thunder_faults
            faults.drop_after_commit("claim")
            faults.server_error("succeed", times=2)
            faults.throttle("page", times=3)
            faults.stale_index()
            task = thunder_client.enqueue(add, {"a": 1})
            assert len(faults.left) == 7
            run_until_idle(add)
            after = thunder_client.get(task)
            assert (after.result, after.attempt, after.fence) == (1, 1, 1)
            assert not faults.left
            kinds = {fault for _, fault in faults.hits}
            assert kinds == {Fault.LOST_REPLY, Fault.SERVER_ERROR, Fault.THROTTLED, Fault.STALE}
            assert thunder_events.of(StoreFailed)

        def test_an_outage_of_a_minute(thunder_client, thunder_clock, thunder_faults, thunder_events, run_until_idle):
            @job("begins.an.outage")
            def begin(ctx: Context, payload: dict[str, int]) -> None:
                thunder_faults.outage(for_s=60)

            task, other = thunder_client.enqueue(begin, {}), thunder_client.enqueue(add, {"a": 1}, delay_s=30)
            began = thunder_clock.now()
            run_until_idle([begin, add])
            assert thunder_client.get(task).attempt == thunder_client.get(other).attempt == 1
            assert thunder_client.get(other).started_at >= began + 60
            assert thunder_events.of(StoreRecovered)

        def test_an_outage_of_a_block(thunder_client, thunder_faults):
            with thunder_faults.outage():
                with pytest.raises(StoreUnavailable):
                    thunder_client.enqueue(add, {"a": 1})
            thunder_client.enqueue(add, {"a": 1})

        @pytest.mark.parametrize("fault", ["drop_before_commit", "server_error", "throttle"])
        def test_what_is_not_done(thunder_client, thunder_faults, fault):
            getattr(thunder_faults, fault)("enqueue")
            with pytest.raises(StoreUnavailable, match="injected: .* of put"):
                thunder_client.enqueue(add, {"a": 1}, task_id="a")
            assert not list(thunder_client.list())

        def test_what_is_done_and_not_told(thunder_client, thunder_faults):
            thunder_faults.drop_after_commit("enqueue")
            with pytest.raises(StoreUnavailable):
                thunder_client.enqueue(add, {"a": 1}, task_id="a")
            assert [task.id for task in thunder_client.list()] == ["a"]

        def test_a_misspelt_request(thunder_faults):
            with pytest.raises(Exception, match="no request is called 'clam'; use one of enqueue, claim, "):
                thunder_faults.throttle("clam")
        """,
    )


def test_the_store_is_closed_after_its_test(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import pytest
        from myjobs import add
        from thunderagent.model.errors import TaskNotFound

        kept = []

        def test_one(thunder_client):
            thunder_client.enqueue(add, {}, task_id="a")
            kept.append(thunder_client)

        def test_other():
            with pytest.raises(TaskNotFound):  # what was in memory has gone with the connection
                kept[0].get("a")
            kept[0].close()
        """,
    )


def test_handlers_see_a_clock_that_stands_still(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import threading
        from myjobs import add
        from thunderagent import Context, job

        def test_it(thunder_client, thunder_clock, thunder_events, run_until_idle):
            moments = []

            @job("looks.at.the.clock")
            def look(ctx: Context, payload: dict[str, int]) -> None:
                for _ in range(20):
                    moments.append(thunder_clock.now())
                    ctx.wait(0.01)

            began = thunder_clock.now()
            task = thunder_client.enqueue(look, {}, queue="slow")
            later = [thunder_client.enqueue(add, {}, delay_s=number * 600) for number in range(1, 4)]
            run_until_idle([look, add], queues={"slow": 1, "default": 2})
            assert set(moments) == {began}
            assert thunder_client.get(task).attempt == 1
            assert [thunder_client.get(one).started_at for one in later] == [began + 600, began + 1200, began + 1800]
        """,
    )


def test_a_pause_ends_in_its_time(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import time
        from myjobs import add

        def test_it(thunder_client, thunder_clock, run_until_idle):
            began, at = time.monotonic(), thunder_clock.now()
            thunder_client.pauses.pause(job=add, for_s=7200)
            task = thunder_client.enqueue(add, {})
            run_until_idle(add)
            assert at + 7200 <= thunder_client.get(task).started_at < at + 7260
            assert time.monotonic() - began < 60
        """,
    )


@pytest.mark.slow
def test_limits_and_snoozes_take_their_turns(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        from thunderagent import Context, Snooze, job

        def test_it(thunder_client, thunder_clock, run_until_idle):
            @job("limited", limit=1)
            def limited(ctx: Context, payload: dict[str, int]) -> Snooze | int:
                if thunder_clock.now() < payload["ready_at"]:
                    return Snooze(60)
                return payload["n"]

            at = thunder_clock.now()
            tasks = [thunder_client.enqueue(limited, {"n": n, "ready_at": at + 1800}) for n in range(6)]
            run_until_idle(limited)
            assert [thunder_client.get(task).result for task in tasks] == list(range(6))
            assert {thunder_client.get(task).attempt for task in tasks} == {1}
            assert 1800 <= thunder_clock.now() - at < 2000
        """,
    )


def test_every_name_of_a_fault_is_that_of_a_request() -> None:
    modules = (Path(thunderagent.__file__).parent / "model" / "writes").glob("*.py")
    sources = "".join(module.read_text(encoding="utf-8") for module in modules)
    verbs = set(re.findall(r'"([a-z ]+)"', sources))
    for name in VERBS:
        faults = FaultyEngine(SqliteEngine(MEMORY))
        faults.throttle(name, times=2)
        [verb] = {verb for verb, _ in faults.left}
        assert verb in verbs or hasattr(Engine, verb), f"{name} never happens"
        faults.close()


def test_a_lost_agents_task_is_taken_over_when_its_time_has_come(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        from myjobs import add
        from thunderagent.model.events import TaskTakenOver
        from thunderagent.queue.limits.waitlist import candidate_of
        from thunderagent.stores.tasks import Wanted

        def test_it(thunder_client, thunder_clock, thunder_events, run_until_idle):
            task = thunder_client.enqueue(add, {"a": 1})
            [lease] = thunder_client.store.claim([Wanted(candidate_of(task), 300.0)], owner="a lost agent")
            run_until_idle(add)
            after = thunder_client.get(task)
            assert (after.result, after.crash_count) == (1, 1)
            assert thunder_events.of(TaskTakenOver)
        """,
    )


@pytest.mark.slow
def test_what_stays_open_is_told_with_its_reason(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import pytest
        from myjobs import add
        from thunderagent.model.errors import WaitTimeout

        def test_it(thunder_client, run_until_idle):
            thunder_client.enqueue("nobody.has.it", {}, task_id="lonely")
            with pytest.raises(WaitTimeout, match="lonely of nobody.has.it is PENDING: the agent has no job"):
                run_until_idle(add, timeout_s=0.5)

        def test_that_waits(thunder_client, thunder_clock, run_until_idle):
            thunder_client.enqueue(add, {}, task_id="paused")
            thunder_client.pauses.pause(job=add, reason="the database moves")
            with pytest.raises(WaitTimeout, match="its job myjobs.add is paused .*: the database moves"):
                run_until_idle(add, timeout_s=0.5)
        """,
    )


@pytest.mark.slow
def test_what_can_never_run_is_told_at_once_where_time_passes_by_itself(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        import time
        import pytest
        from myjobs import add, nightly
        from thunderagent.model.errors import WaitTimeout

        @pytest.fixture(autouse=True)
        def soon():
            began = time.monotonic()
            yield
            assert time.monotonic() - began < 60

        @pytest.mark.parametrize("delay_s", [0.0, 86400.0])
        def test_a_job_that_nobody_has(thunder_client, thunder_clock, run_until_idle, delay_s):
            thunder_client.enqueue("nobody.has.it", {}, task_id="lonely", delay_s=delay_s)
            thunder_client.enqueue(add, {}, task_id="done")
            told = "nothing will run any more.*\\n  lonely of nobody.has.it is PENDING: the agent has no job"
            with pytest.raises(WaitTimeout, match=told):
                run_until_idle(add)
            assert thunder_client.get("done").status == "SUCCESS"

        def test_though_ticks_come(thunder_client, thunder_clock, run_until_idle):
            thunder_client.enqueue("nobody.has.it", {}, task_id="lonely")
            with pytest.raises(WaitTimeout, match="nothing will run any more"):
                run_until_idle([add, nightly])

        def test_what_depends_on_it(thunder_client, thunder_clock, run_until_idle):
            parent = thunder_client.enqueue("nobody.has.it", {}, task_id="lonely")
            thunder_client.enqueue(add, {}, depends_on=[parent], task_id="child")
            with pytest.raises(WaitTimeout, match="child of myjobs.add is BLOCKED: it waits for lonely") as caught:
                run_until_idle(add)
            assert "no agent is alive" not in str(caught.value)

        def test_a_pause_without_an_end(thunder_client, thunder_clock, run_until_idle):
            thunder_client.enqueue(add, {}, task_id="paused")
            thunder_client.pauses.pause(job=add)
            with pytest.raises(WaitTimeout, match="paused of myjobs.add is PENDING: its job myjobs.add is") as caught:
                run_until_idle(add)
            assert "no agent is alive" not in str(caught.value)

        def test_a_queue_that_nobody_looks_into(thunder_client, thunder_clock, run_until_idle):
            thunder_client.enqueue(add, {}, queue="elsewhere")
            with pytest.raises(WaitTimeout, match="the agent does not look into the queue 'elsewhere'"):
                run_until_idle(add)
        """,
    )


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["thunder_clock", "thunder_settings"])
def test_a_task_that_goes_on_for_ever_is_named(project: pytest.Pytester, clock: str) -> None:
    passes(
        project,
        f"""
        import pytest
        from thunderagent import Context, Snooze, job
        from thunderagent.model.errors import WaitTimeout
        from thunderagent.model.events import TaskStarted

        @job("snoozes.forever")
        def snoozes(ctx: Context, payload: dict[str, float]) -> Snooze:
            return Snooze(payload["seconds"])

        @job("fails.forever", max_retry=10**6)
        def fails(ctx: Context, payload: dict[str, int]) -> None:
            raise RuntimeError("again")

        def test_of_snoozes(thunder_client, {clock}, thunder_events, run_until_idle):
            seconds = 60 if "{clock}" == "thunder_clock" else 0.01
            thunder_client.enqueue(snoozes, {{"seconds": seconds}}, task_id="tired")
            told = "tired of snoozes.forever has run 50 times and is still open: it snoozes or .* larger most_runs"
            with pytest.raises(WaitTimeout, match=told):
                run_until_idle(snoozes, most_runs=50)
            assert 50 <= len(thunder_events.of(TaskStarted)) < 60

        def test_of_retries(thunder_client, {clock}, run_until_idle):
            thunder_client.enqueue(fails, {{}}, task_id="stubborn")
            told = "stubborn of fails.forever has run 20 times and is still open, with .* retries, the last after"
            with pytest.raises(WaitTimeout, match=told):
                run_until_idle(fails, most_runs=20)
        """,
    )


def test_runs_are_not_counted_while_a_span_of_time_passes(project: pytest.Pytester) -> None:
    passes(
        project,
        """
        from thunderagent import Context, Snooze, job
        from thunderagent.model.events import TaskStarted

        @job("looks.each.minute")
        def looks(ctx: Context, payload: dict[str, int]) -> Snooze:
            return Snooze(60)

        def test_it(thunder_client, thunder_clock, thunder_events, run_until_idle):
            thunder_client.enqueue(looks, {})
            run_until_idle(looks, for_s=1800, most_runs=5)
            assert len(thunder_events.of(TaskStarted)) >= 30
        """,
    )


@pytest.mark.slow
def test_a_failure_shows_the_line_of_the_test_and_not_the_library(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_it="""
        from myjobs import add
        from thunderagent.model.events import TaskFailed

        def test_idle(thunder_client, thunder_clock, run_until_idle):
            thunder_client.enqueue("nobody.has.it", {})
            run_until_idle(add)

        def test_no_jobs(run_until_idle):
            run_until_idle()

        def test_events(thunder_events):
            thunder_events.wait_for(TaskFailed, timeout_s=0.01)
        """
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=3)
    places = [line for line in result.outlines if re.match(r"\S+\.py:\d+:", line)]
    assert len(places) == 3, "\n".join(result.outlines)
    assert all(line.startswith("test_it.py:") for line in places)


def test_settings_come_from_a_fixture_and_a_call_and_never_from_the_environment(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THUNDERAGENT_QUEUES", '{"reports": 1}')
    monkeypatch.setenv("THUNDERAGENT_STORE", "dynamodb://Production?region=eu-central-1")
    passes(
        project,
        """
        import pytest
        from myjobs import add

        @pytest.fixture
        def thunder_settings():
            return {"max_retry": 7}

        def test_it(thunder_client, run_until_idle):
            assert thunder_client.store.engine.url == "sqlite://:memory:"
            assert thunder_client.settings.max_retry == 7
            task = thunder_client.enqueue("myjobs.add", {"a": 1})
            run_until_idle(add, max_retry=1, slots=3)
            assert thunder_client.get(task).result == 1
        """,
    )


@pytest.mark.slow
def test_it_works_in_several_processes(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_it="""
        import pytest
        from myjobs import fails

        @pytest.mark.parametrize("number", range(6))
        def test_it(thunder_client, thunder_clock, run_until_idle, number):
            task = thunder_client.enqueue(fails, {"times": 2}, delay_s=3600)
            run_until_idle(fails)
            assert thunder_client.get(task).result == 3
        """
    )
    result = project.runpytest_subprocess("-n", "2", timeout=120)
    result.assert_outcomes(passed=6)


@pytest.mark.slow
def test_a_project_that_does_not_use_it_imports_nothing_of_us(tmp_path: Path) -> None:
    test = "import sys\ndef test_it():\n    assert 'pytest_thunderagent' in sys.modules\n"
    test += "    assert not {'thunderagent', 'boto3', 'pydantic', 'loguru'} & sys.modules.keys()\n"
    (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout
