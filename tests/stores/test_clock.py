"""The clock that agents learn from the `Date` of DynamoDB's replies."""

from __future__ import annotations

import random
import time
from email.utils import formatdate

import pytest

from tests.support.stands import Stand
from tests.support.wire import lost_replies
from thunderagent.model.clock import DRIFT, DateClock, HostClock, since_boot

EPOCH = 1_760_000_000


class World:
    """A service whose clock is true, and a host whose monotonic clock starts somewhere and whose wall clock is off."""

    def __init__(self, *, skew_s: float = 0.0, start: float = 5000.0) -> None:
        self.true = float(EPOCH)
        self.skew_s = skew_s
        self._start = start
        self.rate = 1.0
        self.clock = DateClock(monotonic=lambda: self.monotonic, host=lambda: self.true + skew_s)

    @property
    def monotonic(self) -> float:
        return self._start + (self.true - EPOCH) * self.rate

    def ask(self, there_s: float = 0.02, back_s: float = 0.02) -> None:
        """One request and its reply."""
        sent = self.monotonic
        self.true += there_s
        date = formatdate(int(self.true), usegmt=True)
        self.true += back_s
        self.clock.observe(date, sent=sent, received=self.monotonic)


@pytest.mark.parametrize("skew_s", [0.0, 600.0, -600.0])
def test_the_bounds_hold_the_true_time_and_narrow_whatever_the_host_says(skew_s: float) -> None:
    world, rng = World(skew_s=skew_s), random.Random(7)
    for _ in range(200):
        world.ask(rng.uniform(0.001, 0.2), rng.uniform(0.001, 0.2))
        assert world.clock.earliest() <= world.true <= world.clock.latest()
        world.true += rng.uniform(0, 3)
    assert world.clock.latest() - world.clock.earliest() < 0.15
    assert world.clock.now() == pytest.approx(world.true, abs=0.1)
    assert world.clock.skew == pytest.approx(skew_s, abs=0.1)


def test_one_reply_bounds_the_time_to_its_second_and_its_way() -> None:
    world = World()
    world.true += 0.75
    world.ask(0.1, 0.3)
    assert world.clock.earliest() == pytest.approx(EPOCH)  # made at .85, the header says .0
    assert world.clock.latest() == pytest.approx(EPOCH + 1 + 0.4)


def test_setting_the_clock_of_the_host_changes_nothing() -> None:
    clock = DateClock(monotonic=lambda: 10.0, host=iter([1.0, 5e9]).__next__)
    clock.observe(formatdate(EPOCH, usegmt=True), sent=10.0, received=10.0)
    first = clock.now()
    assert clock.skew == pytest.approx(1.0 - first)
    assert clock.now() == first


def test_a_service_whose_clock_was_set_is_followed_at_once() -> None:
    world = World()
    for _ in range(20):
        world.ask()
        world.true += 0.7
    date = formatdate(int(world.true) + 7200, usegmt=True)
    world.clock.observe(date, sent=world.monotonic, received=world.monotonic)
    assert world.clock.now() == pytest.approx(world.true + 7200, abs=1.1)


@pytest.mark.parametrize("rate", [1 + DRIFT * 0.9, 1 - DRIFT * 0.9])
def test_old_bounds_widen_as_fast_as_clocks_may_drift(rate: float) -> None:
    world = World()
    world.rate = rate
    for _ in range(50):
        world.ask()
        world.true += 0.37
    world.true += 36_000
    assert world.clock.earliest() <= world.true <= world.clock.latest()
    world.ask()
    assert world.clock.earliest() <= world.true <= world.clock.latest()
    assert world.clock.latest() - world.clock.earliest() < 1.2


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux counts the seconds of its sleep")
def test_seconds_count_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= since_boot() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: real(which) + 3600 * (which == time.CLOCK_BOOTTIME))
    assert since_boot() >= before + 3600
    assert DateClock().monotonic() >= before + 3600, "it is what everything counts on by itself"


@pytest.mark.parametrize("slept", ["on the way", "between two"])
def test_a_machine_that_slept_still_knows_the_time(slept: str) -> None:
    world = World()
    world.ask()
    if slept == "on the way":  # the reply is read an hour after it came
        world.ask(back_s=3600.0)
    else:
        world.true += 3600.0
    assert world.clock.earliest() <= world.true <= world.clock.latest()


def test_an_engine_times_its_requests_on_the_clock_of_what_it_learns(
    dynamo_stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another one than its bounds, the sleep of a machine would shift the time of all leases."""
    engine, noted = dynamo_stand.dynamo, list[tuple[float, float]]()
    with monkeypatch.context() as patched:
        patched.setattr(engine.clock, "monotonic", iter([100.0, 3700.0]).__next__)
        patched.setattr(engine.clock, "observe", lambda date, *, sent, received: noted.append((sent, received)))
        engine.get(["nobody"])
    assert noted == [(100.0, 3700.0)]


@pytest.mark.parametrize("date", [None, "", "yesterday", "Mon, 99 Foo 2026 99:99:99 GMT"])
def test_without_a_date_the_clock_is_not_usable(date: str | None) -> None:
    clock = DateClock(monotonic=lambda: 10.0, host=lambda: 77.0)
    clock.observe(date, sent=1.0, received=2.0)
    assert not clock.is_usable
    assert (clock.earliest(), clock.now(), clock.latest()) == (77.0, 77.0, 77.0)


def test_a_broken_date_does_not_spoil_what_is_known() -> None:
    world = World()
    world.ask()
    before = world.clock.earliest(), world.clock.latest()
    world.clock.observe("broken", sent=world.monotonic, received=world.monotonic)
    assert (world.clock.earliest(), world.clock.latest()) == before


def test_the_clock_of_the_host_is_exact() -> None:
    clock = HostClock(lambda: 42.5)
    assert clock.is_usable
    assert (clock.earliest(), clock.now(), clock.latest()) == (42.5, 42.5, 42.5)


def test_an_engine_learns_the_time_from_its_replies_and_shares_it_with_its_sibling(dynamo_stand: Stand) -> None:
    clock = dynamo_stand.dynamo.clock
    sibling = dynamo_stand.dynamo.sibling()
    assert sibling.clock is clock
    sibling.close()
    fresh = dynamo_stand.open().engine
    assert isinstance(fresh.clock, DateClock)
    assert not fresh.clock.is_usable
    fresh.get(["nobody"])
    assert fresh.clock.is_usable
    assert abs(fresh.clock.skew) < 1.5
    assert fresh.clock.latest() - fresh.clock.earliest() < 1.5


@pytest.mark.slow
def test_the_moment_of_sending_is_that_of_the_attempt_that_was_answered(wire_stand: Stand) -> None:
    """A first attempt that was lost seconds ago must not widen the bounds."""
    engine = wire_stand.dynamo
    noted: list[float] = []
    engine.clock.observe = lambda date, *, sent, received: noted.append(received - sent)  # type: ignore[method-assign]
    with lost_replies(engine, "GetItem", then=lambda: time.sleep(0.3)) as lost:
        engine.lanes()
    assert lost.met == 1
    assert len(noted) == 1, "an attempt without a reply tells no time"
    assert noted[0] < 0.3
