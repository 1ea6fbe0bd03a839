"""The thread of an agent: what it finds about its own region, tells, and is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.websocket_api.canary.support import Api, an_api, run
from thunderagent.agent.threads import BackgroundThreads
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.events import ThreadDied
from thunderagent.model.fleet_events import CanaryBlind, CanaryDown, CanaryProbed, CanaryUp
from thunderagent.telemetry.logs import LEVELS
from thunderagent.telemetry.meter import Meter, Reader
from thunderagent.telemetry.metrics import CANARY_HEALTHY, CANARY_LATENCY
from thunderagent.testing import FakeClock, Recorder
from thunderagent.websocket_api.canary.probe import BUDGET_S, Prober
from thunderagent.websocket_api.canary.tokens import Tokens
from thunderagent.websocket_api.canary.watch import STALE_TURNS, CanaryWatch

pytestmark = pytest.mark.slow

OWN, OTHER = "eu-central-1", "eu-west-1"
EVERY_S = 30.0


@pytest.fixture
def own() -> Iterator[Api]:
    with an_api(OWN) as api:
        yield api


class World:
    """A watch on a clock that is set by hand, and all that it tells."""

    def __init__(
        self,
        targets: dict[str, str],
        *,
        own: str | None = OWN,
        budget_s: float = BUDGET_S,
        tokens: Tokens | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.bus = EventBus()
        self.recorder = Recorder(self.bus)
        self.meter = Meter(self.bus, monotonic=self.clock.monotonic)
        self.facts: dict[str, Any] = {"http": "x"}
        prober = Prober(OWN, tokens or Tokens(None), who="me", budget_s=budget_s)
        self.watch = CanaryWatch(
            targets,
            prober,
            self.bus,
            own=own,
            every_s=EVERY_S,
            facts=self.facts,
            now=self.clock.now,
            monotonic=self.clock.monotonic,
        )

    def turns(self, number: int) -> list[bool]:
        """What it says of its region after each of some turns."""
        said = []
        for _ in range(number):
            self.clock.advance(EVERY_S)
            run(self.watch.turn())
            said.append(self.watch.is_well)
        return said


def broken(api: Api) -> None:
    api.changes["ping"] = lambda asked, right: "{not json"


def test_a_region_is_healthy_after_two_successes_down_after_two_failures_and_back_after_five(own: Api) -> None:
    world = World({OWN: own.url})
    assert not world.watch.is_well
    assert world.turns(3) == [False, True, True]
    broken(own)
    assert world.turns(3) == [True, False, False]
    own.changes.clear()
    assert world.turns(6) == [False] * 4 + [True] * 2


def test_one_failure_does_not_end_it_and_counts_begin_again(own: Api) -> None:
    world = World({OWN: own.url})
    world.turns(4)
    assert world.watch.successes == 4
    broken(own)
    assert world.turns(1) == [True]
    assert world.watch.successes == 0
    own.changes.clear()
    assert world.turns(2) == [True, True]
    assert (world.watch.is_well, world.watch.successes) == (True, 2)


@pytest.mark.parametrize("status", [429, 401])
def test_a_canary_that_cannot_judge_keeps_the_last_judgement_and_stops_no_region_at_its_start(status: int) -> None:
    with an_api(OWN) as own, an_api(OTHER) as other:
        for known in ([], [True], [False], [True] * 2, [True] * 3, [True, True, False], [False] * 2):
            world = World({OWN: own.url, OTHER: other.url}, tokens=Tokens("env:HOME"))
            for ok in known:
                own.status = None if ok else 503
                world.turns(1)
            own.status = other.status = status
            assert world.turns(4) == [known != [False] * 2] * 4
            told = [one.healthy for one in world.recorder.of(CanaryProbed) if one.target == OWN]
            assert told[len(known) :] == [known != [False] * 2] * 4  # what the alarm goes by
            [blind, *_] = [one for one in world.recorder.of(CanaryBlind) if one.target == OWN]
            assert blind.unjudged == ("throttled" if status == 429 else "token")
            own.status = other.status = None


def test_what_changes_is_told_with_the_step_and_the_reason(own: Api) -> None:
    world = World({OWN: own.url})
    world.turns(2)
    broken(own)
    world.turns(3)
    own.changes.clear()
    world.turns(5)
    assert [(one.target, one.observer, one.successes) for one in world.recorder.of(CanaryUp)] == [
        (OWN, OWN, 2),
        (OWN, OWN, 5),
    ]
    [down] = world.recorder.of(CanaryDown)
    assert (down.target, down.step, down.reason, down.failures) == (OWN, "ping", "what came is not JSON", 2)
    assert [one.ok for one in world.recorder.of(CanaryProbed)] == [True] * 2 + [False] * 3 + [True] * 5


def test_the_metric_shows_a_failure_at_once_and_a_return_after_five_successes(own: Api) -> None:
    world = World({OWN: own.url})
    reader = Reader(world.meter.read)
    series = (CANARY_HEALTHY, f"{OWN}/{OWN}")
    seen = []
    for number in range(12):
        if number == 2:
            broken(own)
        if number == 5:
            own.changes.clear()
        world.turns(1)
        reading = reader.take()
        reader.kept(reading.gauges)
        seen.append(reading.gauges[series])
    assert seen == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert series not in reader.take().gauges  # nothing was tried since: an alarm on missing data goes off


def test_every_step_has_a_latency_by_its_name(own: Api) -> None:
    world = World({OWN: own.url})
    world.turns(3)
    reading = world.meter.read()
    steps = {label for metric, label in reading.distributions if metric is CANARY_LATENCY}
    assert steps == {f"{OWN}/{step}" for step in ("token", "connect", "auth", "ping", "setState", "getState", "close")}
    assert reading.distributions[CANARY_LATENCY, f"{OWN}/ping"].number == 3


def test_a_judgement_that_is_old_is_none(own: Api) -> None:
    world = World({OWN: own.url})
    world.turns(2)
    world.clock.advance(STALE_TURNS * EVERY_S + BUDGET_S)
    assert world.watch.is_well
    world.clock.advance(0.1)
    assert (world.watch.is_well, world.watch.successes) == (False, 0)


def test_other_regions_are_tried_at_every_second_turn_and_decide_nothing(own: Api) -> None:
    with an_api(OTHER) as other:
        broken(other)
        world = World({OWN: own.url, OTHER: other.url})
        assert world.turns(4) == [False, True, True, True]
        assert [one.target for one in world.recorder.of(CanaryProbed)] == [OWN, OTHER, OWN, OWN, OTHER, OWN]
        assert [one.target for one in world.recorder.of(CanaryDown)] == [OTHER]
        assert world.watch.judged[OTHER].is_up is False


@pytest.mark.parametrize("name", [None, "us-east-1"])
def test_an_agent_whose_region_is_no_target_knows_nothing_of_its_own(own: Api, name: str | None) -> None:
    world = World({OWN: own.url}, own=name)
    assert world.turns(3) == [False] * 3
    assert not world.watch.has_own_target
    assert [one.target for one in world.recorder.of(CanaryProbed)] == [OWN] * 3


def test_the_row_of_the_agent_tells_each_target(own: Api) -> None:
    world = World({OWN: own.url})
    assert world.facts == {"http": "x", "canary": {}}
    world.turns(2)
    entry = world.facts["canary"][OWN]
    assert (entry["state"], entry["ok"], entry["at"]) == ("up", True, world.clock.now())
    broken(own)
    world.turns(2)
    entry = world.facts["canary"][OWN]
    assert (entry["state"], entry["step"], entry["reason"]) == ("down", "ping", "what came is not JSON")


# The thread


def a_thread(api: Api, bus: EventBus, *, every_s: float = 0.05, budget_s: float = 10.0) -> CanaryWatch:
    prober = Prober(OWN, Tokens(None), budget_s=budget_s)
    return CanaryWatch({OWN: api.url}, prober, bus, own=OWN, every_s=every_s)


def test_it_begins_at_once_and_goes_on_by_itself_until_it_is_closed(own: Api) -> None:
    bus = EventBus()
    recorder = Recorder(bus)
    watch = a_thread(own, bus)
    assert not watch.is_alive
    watch.start()
    recorder.wait_for(CanaryUp)
    assert (watch.is_alive, watch.is_well) == (True, True)
    broken(own)
    recorder.wait_for(CanaryDown)
    assert not watch.is_well
    watch.close()
    assert not watch.is_alive


def test_an_attempt_under_way_does_not_hold_up_its_end(own: Api) -> None:
    own.changes["ping"] = lambda asked, right: None
    watch = a_thread(own, EventBus())
    asked = threading.Event()
    own.changes["ping"] = lambda asked_, right: asked.set()
    watch.start()
    assert asked.wait(10)
    watch.close()
    assert not watch.is_alive
    assert own.seen


def test_a_pause_under_way_does_not_hold_up_its_end_and_it_may_begin_again(own: Api) -> None:
    bus = EventBus()
    recorder = Recorder(bus)
    watch = a_thread(own, bus, every_s=600.0)
    for _ in range(2):
        watch.start()
        recorder.wait_for(CanaryProbed)
        watch.close()
        recorder.close()
        recorder = Recorder(bus)
        assert not watch.is_alive


def test_while_nothing_is_known_it_does_not_wait_for_its_next_turn(own: Api) -> None:
    watch = a_thread(own, EventBus(), every_s=600.0)
    assert watch._pause_s() <= 2.0
    for _ in range(2):
        run(watch.turn())
    assert watch._pause_s() >= 450.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_its_death_is_noticed_and_it_is_started_again(own: Api) -> None:
    bus, clock = EventBus(), FakeClock()
    recorder = Recorder(bus)
    watch = a_thread(own, bus)
    threads = BackgroundThreads([watch], bus, monotonic=clock.monotonic)
    is_to_fail = threading.Event()
    is_to_fail.set()
    whole = watch.turn

    async def failing() -> Any:
        if is_to_fail.is_set():
            raise LookupError("what nobody expected")
        return await whole()

    watch.turn = failing  # type: ignore[method-assign]
    threads.start()
    assert watch._thread is not None
    watch._thread.join(10)
    assert threads.dead == ("canary",)
    is_to_fail.clear()
    clock.advance(60)
    threads.look_after()
    assert [(one.thread, one.restarted) for one in recorder.of(ThreadDied)] == [("canary", True)]
    recorder.wait_for(CanaryUp)
    threads.close()
    assert not watch.is_alive


def test_what_goes_down_is_a_warning_and_what_comes_back_is_none() -> None:
    kinds: list[type[Event]] = [CanaryProbed, CanaryDown, CanaryUp]
    assert [LEVELS[kind][0] for kind in kinds] == ["DEBUG", "WARNING", "INFO"]
