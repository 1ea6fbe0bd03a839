"""The drill of the loss of a region: played whole, many times faster, and shown to fail without what it is about."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from tests.support.stands import eventually
from thunderagent.model.errors import StoreUnavailable

SCRIPTS: Final = Path(__file__).parents[2] / "scripts"
SCALE: Final = 30.0
LONG_S: Final = 150.0
ENVIRONMENT: Final = {**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"}


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "drills", "region-loss", *options]


def play(told: Path, *options: str, good_end: bool = True, scale: float = SCALE) -> tuple[int, dict[str, Any], str]:
    """Its exit code, what it found, and what it said.

    A machine that stood still for so long that a grant ends by that alone says nothing about us: it plays it slower.
    """
    ran = subprocess.run(
        command("--scale", str(scale), "--json", str(told), *options),
        capture_output=True,
        text=True,
        timeout=LONG_S * SCALE / scale,
        env=ENVIRONMENT,
        check=False,
    )
    found: dict[str, Any] = json.loads(told.read_text())
    is_wrong = "problem" in found or found["ok"] != good_end
    if is_wrong and found["is_strained"] and scale == SCALE:
        return play(told, *options, good_end=good_end, scale=SCALE / 3)
    return ran.returncode, found, ran.stdout + ran.stderr


@pytest.mark.processes
def test_a_region_is_lost_and_comes_back_and_nothing_that_is_promised_is_lost_with_it(tmp_path: Path) -> None:
    code, found, said = play(tmp_path / "found.json", "--clients", "24", "--streams", "10")
    assert {name for name, goal in found.get("goals", {}).items() if not goal["ok"]} == set(), said
    assert code == 0 and found["ok"], said
    loss, back = ({mark["name"]: mark for mark in one} for one in found["timelines"].values())
    order = ["lost", "stopped", "taken", "first task", "streams"]
    assert sorted(order, key=lambda name: loss[name]["real_s"]) == order, "one region stops before the other begins"
    assert loss["switched"]["real_s"] < loss["clients all"]["real_s"]
    order = ["back", "ordered", "drains", "stopped", "taken", "first task", "streams", "clients all"]
    assert sorted(order, key=lambda name: back[name]["real_s"]) == order
    assert loss["stopped"]["story_s"] == pytest.approx(loss["stopped"]["real_s"] * found["scale"], abs=0.1)
    assert found["epoch"] == 3
    assert found["changes"]["acknowledged"] > 24 and found["changes"]["lost"] == []
    assert found["late_writes"]["landed"] == 10
    assert "All goals are reached." in said


@pytest.mark.processes
def test_without_the_gate_the_drill_finds_two_regions_at_work(tmp_path: Path) -> None:
    options = ("--clients", "0", "--streams", "4", "--no-failback", "--without", "gate")
    code, found, said = play(tmp_path / "found.json", *options, good_end=False)
    assert code == 1 and not found["ok"]
    missed = {name for name, goal in found["goals"].items() if not goal["ok"]}
    assert {"stopped", "one region"} <= missed, said
    assert "TWO REGIONS WERE ACTIVE" in said


@pytest.mark.processes
def test_a_drill_that_is_told_to_end_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        command("--scale", str(SCALE), "--clients", "2", "--streams", "1"),
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            assert any("is lost" in line for line in process.stdout)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
            eventually(lambda: not Path(f"/proc/{children[0]}").exists())
        finally:
            process.kill()


# The verdict


@pytest.fixture
def drills(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What judges, and the command line."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("findings", "ledger", "pace", "workloads", "__main__")
    findings, ledger, pace, workloads, cli = (importlib.import_module(f"drills.{name}") for name in names)
    return SimpleNamespace(Found=findings.Found, Run=ledger.Run, Pace=pace.Pace, Load=workloads.Load, app=cli.app)


def test_a_scale_that_no_machine_keeps_up_with_is_refused(drills: Any) -> None:
    ran = CliRunner().invoke(drills.app, ["region-loss", "--scale", "1000"])
    assert ran.exit_code == 2
    assert "use 1 to 40" in ran.output


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_played(drills: Any, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "nowhere" / "found.json"):
        ran = CliRunner().invoke(drills.app, ["region-loss", "--clients", "0", "--json", str(file)])
        assert ran.exit_code == 2
        assert "cannot be written" in " ".join(ran.output.split())


def person(user: str, acknowledged: list[int], **changes: Any) -> dict[str, Any]:
    values = {
        "user": user,
        "device": 0,
        "acknowledged": [[number, 0.0, "A"] for number in acknowledged],
        "unacknowledged": 0,
        "region": "A",
        "events": [["again", 5.0, "B", 1]],
    }
    return {**values, **changes}


class Story:
    """A timeline by heart; the scale is 10."""

    def __init__(self, **marks: float) -> None:
        self.marks = {name.replace("_", " "): at for name, at in marks.items()}

    def since(self, name: str) -> float | None:
        return self.marks.get(name)


def runs(drills: Any) -> list[Any]:
    """A task under each of three epochs, one after the other, and one that was run again."""

    def run(task: str, region: str, epoch: int, begun: float, ended: float | None, **more: Any) -> Any:
        values = {"fence": epoch, "is_stream": False, "is_done": True, **more}
        return drills.Run(task_id=task, region=region, epoch=epoch, begun=begun, ended=ended, **values)

    return [
        run("one", "A", 1, 0.0, 2.0),
        run("one", "B", 2, 4.0, 5.0),
        run("two", "B", 2, 4.0, 5.0),
        run("three", "A", 3, 8.0, 9.0),
    ]


def found(drills: Any, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "pace": drills.Pace(10.0),
        "loss": Story(switched=14.0, agents_active=4.5, stopped=2.4, streams=5.0, clients_all=28.9),
        "back": Story(),
        "lost_region": "A",
        "other_region": "B",
        "streams": 1,
        "clients": 1,
        "epoch": 3,
        "runs": runs(drills),
        "messages": {"s": {1: 1, 2: 2, 3: 1}},
        "open_tasks": {},
        "tasks": 3,
        "report": {"people": [person("u", [1, 2])], "messages": 3},
        "states": {"u": {"done": {"0.1": 1, "0.2": 1}}},
    }
    return drills.Found(**{**values, **changes})


def missed(found: Any) -> set[str]:
    return {goal.name for goal in found.goals() if not goal.ok}


def test_a_good_end_reaches_every_goal(drills: Any) -> None:
    whole = found(drills)
    assert missed(whole) == set()
    assert (whole.again, whole.repeated, whole.changes) == (1, 1, 2)


def _beside(drills: Any) -> dict[str, Any]:
    both = runs(drills)
    both[0].ended = None
    return {"runs": both}


def _same_fence(drills: Any) -> dict[str, Any]:
    both = runs(drills)
    both[1].fence = both[0].fence
    return {"runs": both}


def _again(drills: Any) -> dict[str, Any]:
    return {"runs": [*runs(drills), runs(drills)[2]]}


@pytest.mark.parametrize(
    ("damage", "goals"),
    [
        (
            lambda _: {"loss": Story(switched=15.5, agents_active=15.5, stopped=3.5)},
            {"switched", "agents active", "stopped", "streams", "clients all"},
        ),
        (
            lambda _: {"loss": Story(switched=15.0, agents_active=4.8, stopped=3.0, streams=6.3, clients_all=27.0)},
            {"agents active", "streams"},
        ),
        (_beside, {"one region"}),
        (_again, {"nothing twice silently"}),
        (_same_fence, {"nothing twice silently"}),
        (lambda _: {"epoch": 5}, {"one region"}),
        (lambda _: {"open_tasks": {"one": "RUNNING"}}, {"no task lost"}),
        (lambda _: {"messages": {"s": {1: 1, 3: 1}}}, {"streams whole"}),
        (
            lambda _: {"messages": {"s": {1: 1}}, "report": {"messages": 100, "people": [person("u", [1])]}},
            {"streams whole"},
        ),
        (lambda _: {"states": {"u": {"done": {"0.1": 1}}}}, {"no state lost"}),
        (lambda _: {"states": {}}, {"no state lost"}),
        (lambda _: {"report": {"people": [person("u", [1], region="B")]}}, {"clients with state"}),
        (lambda _: {"report": {"people": [person("u", [1], unacknowledged=1)]}}, {"clients with state"}),
        (lambda _: {"stale": ["s"]}, {"late writes"}),
        (lambda _: {"differences": ["one"]}, {"replicas equal"}),
    ],
    ids=lambda one: "" if callable(one) else "+".join(sorted(one)),
)
def test_each_thing_that_was_not_kept_is_told(
    drills: Any, damage: Callable[[Any], Mapping[str, Any]], goals: set[str]
) -> None:
    assert missed(found(drills, **damage(drills))) == goals


def test_two_devices_that_write_in_two_regions_at_once_are_told_apart_from_a_loss(drills: Any) -> None:
    other = {**person("u", []), "device": 1, "acknowledged": [[7, 0.1, "B"]]}
    report = {"people": [person("u", [1, 2]), other], "messages": 3}
    states = {"u": {"done": {"0.1": 1, "1.7": 1}}}
    told = found(drills, report=report, states=states)
    assert (told.collided, told.lost_changes, missed(told)) == (["u: 0.2"], [], set())
    other["acknowledged"] = [[7, 1.0, "B"]]
    assert missed(told) == {"no state lost"}


def test_an_order_that_no_table_has_acknowledged_when_the_drill_stops_is_none(drills: Any) -> None:
    def enqueue(job: str, payload: object, *, task_id: str) -> None:
        if task_id == "order-1":
            load._stop_asked.set()
            raise StoreUnavailable("no answer")

    load = drills.Load({"A": SimpleNamespace(enqueue=enqueue)}, drills.Pace(30.0))
    load.run()
    assert (load.put, load.failure) == ({"order-0": "A"}, None)


@pytest.mark.parametrize("told", [True, False])
def test_clients_may_end_when_they_have_told_everything_and_not_before(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    answer = "input(); print('{\"report\": {}}')" if told else "input()"
    with subprocess.Popen(
        [sys.executable, "-c", answer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        crowd = importlib.import_module("drills.crowd")
        clients = crowd.Crowd(process)
        if told:
            assert clients.report() == {}
            process.wait(LONG_S)
            clients.check()
        else:
            clients.rest()
            process.wait(LONG_S)
            with pytest.raises(crowd.CrowdFailed, match="ended with exit code 0"):
                clients.check()
