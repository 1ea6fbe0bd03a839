"""Health of real processes: what a machine, a load balancer and a person see from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import LEASE_S, Place, Start
from tests.acceptance.processes import HERE, LONG_S, AgentProcess, Marks, cli, is_alive, until
from tests.acceptance.proxy import Proxy, proxy
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

HEALTH_S = 4.0
"""Short, so that a test does not take minutes; the sweep and the poll are as short."""


@pytest.fixture
def gate(ministack_endpoint: str) -> Iterator[Proxy]:
    """The network between an agent and its table."""
    with proxy(ministack_endpoint) as running:
        yield running


def behind(place: Place, gate: Proxy) -> str:
    """The URL of a place through the gate."""
    return f"{place.url.partition('&')[0]}&endpoint={gate.endpoint}"


def asked(agent: AgentProcess) -> tuple[int, dict[str, Any]]:
    """What the port of an agent answers."""
    url = str(agent.line("agent started")["http"])
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_behind_a_network_that_swallows_everything_an_agent_turns_red_and_works_again_by_itself(
    ministack_place: Place, start: Start, marks: Marks, gate: Proxy, tmp_path: Path
) -> None:
    place, folder = ministack_place, tmp_path / "health"
    cut_off = start(behind(place, gate), health_s=HEALTH_S, health_folder=folder, http_port=21900)
    tasks = [place.client.enqueue(f"hold.{kind}", marks.payload) for kind in ("sync", "async", "isolated")]
    child = [marks.read(task.id, 1, "started")["pid"] for task in tasks][2]
    assert asked(cut_off)[0] == 200
    assert cli("health", "--folder", str(folder), cwd=tmp_path).returncode == 0

    gate.hang()
    hung, heir = time.monotonic(), start(place)
    marks.read(tasks[2].id, 2, "started", within_s=30)
    assert not is_alive(child), "another agent has its task"
    for task in tasks[:2]:
        assert marks.read(task.id, 1, "stopped", within_s=30)["why"] == "LeaseLost"
        marks.read(task.id, 2, "started", within_s=30)
        assert marks.when(task.id, 1, "stopped") < marks.when(task.id, 2, "started"), "it ran twice at once"
    until(lambda: "the store has not answered" in str(asked(cut_off)[1]["reasons"]), HEALTH_S + 30, "its reason")
    status, told = asked(cut_off)
    assert (status, told["healthy"], told["alive"]) == (503, False, True), "a watchdog would not mend the network"
    assert told["reasons"][0].startswith("the store has not answered for "), "the cause comes first"
    until(lambda: "timeout" in str(asked(cut_off)[1]["reasons"]).lower(), 30.0, "the error of the first request")
    red = cli("health", "--folder", str(folder), cwd=tmp_path)
    assert red.returncode == 1
    assert f"{cut_off.name} not healthy: the store has not answered for " in red.stdout
    assert cut_off.line("health has changed", healthy=False)
    until(lambda: time.monotonic() - hung > 4 * LEASE_S, 30, "several lengths of a lease")

    gate.on()
    until(lambda: asked(cut_off)[0] == 200, 60, lambda: f"a green answer; it is {asked(cut_off)}\n{cut_off.log.tail}")
    until(lambda: cli("health", "--folder", str(folder), cwd=tmp_path).returncode == 0, 20, "a green file")
    marks.release()
    for task in tasks:
        done = place.wait(task.id, Status.SUCCESS, within_s=40)
        assert (done.fence, done.crash_count) == (2, 1), "nobody else had it in between"
    assert heir.stop() == 0
    again = place.client.enqueue("quick.add", {"a": 1})
    assert place.wait(again.id, Status.SUCCESS, within_s=40).result == {"sum": 2}
    assert cut_off.stop() == 0
    assert list(folder.iterdir()) == [], "a good end leaves no file"


def test_an_agent_that_was_killed_is_red_until_another_is_started_in_its_place(
    sqlite_place: Place, start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "health"
    victim = start(sqlite_place, health_folder=folder)
    file = folder / f"{victim.pid}.json"
    until(lambda: file.exists() and json.loads(file.read_text())["ready"], LONG_S, "the file of an agent that polls")
    victim.kill()
    until(lambda: cli("health", "--folder", str(folder), cwd=tmp_path).returncode == 1, LONG_S, "red")
    said = cli("health", "--folder", str(folder), cwd=tmp_path).stdout
    assert f"{file} was not written for " in said
    assert "its process is gone" in said
    heir = start(sqlite_place, health_folder=folder)
    until(lambda: [path.stem for path in folder.glob("*.json")] == [str(heir.pid)], LONG_S, "its file instead")
    assert cli("health", "--folder", str(folder), cwd=tmp_path).returncode == 0
    assert cli("health", "--agent", heir.name, cwd=tmp_path, store=sqlite_place.url).returncode == 0
    heir.freeze()
    until(lambda: cli("health", "--folder", str(folder), cwd=tmp_path).returncode == 1, LONG_S, "red when frozen")
    heir.send(signal.SIGCONT)
    until(lambda: cli("health", "--folder", str(folder), cwd=tmp_path).returncode == 0, LONG_S, "green again")
    assert heir.stop() == 0


def test_an_error_out_of_the_loop_ends_the_process_loudly_and_gives_its_tasks_back(
    sqlite_place: Place, start: Start, marks: Marks
) -> None:
    agent = start(sqlite_place, jobs="brokenjobs", cwd=HERE, drain_s=0.5)
    held = sqlite_place.client.enqueue("hold.sync", marks.payload)
    marks.read(held.id, 1, "started")
    sqlite_place.client.enqueue("break.loop", None)
    assert agent.wait(20) == 1
    assert agent.log.lines("agent ends by an error that nobody expected", error="LookupError('a bug in the loop')")
    assert "Traceback (most recent call last)" in agent.log.other
    assert "error: the agent ended by LookupError('a bug in the loop')" in agent.log.other
    back = sqlite_place.task(held.id)
    assert (back.status, back.fence, back.crash_count, back.retry_count) == (Status.PENDING, 1, 0, 0)
    assert not sqlite_place.client.agents.list()


def test_systemd_hears_of_a_real_agent_from_its_first_poll_to_its_drain(
    sqlite_place: Place, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = f"@thunderagent-acceptance-{os.getpid()}"
        manager.bind(address.replace("@", "\0", 1))
        manager.settimeout(15)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        agent = start(sqlite_place)
        heard: list[str] = []

        def hears(line: str) -> None:
            while line not in heard:
                heard.extend(manager.recv(65536).decode().split("\n"))

        hears("READY=1")
        hears("WATCHDOG=1")
        agent.send(signal.SIGTERM)
        hears("STOPPING=1")
        assert agent.wait(15) == 0
