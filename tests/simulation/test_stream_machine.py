"""Random faults of peers, agents and the store, and commands of the application, against the rules of streams.

Everything runs in one thread on a clock that moves by hand (`stream_world.py`): real agents, real connections over a
network in memory, a real store. An example is a list of steps and the seed of the order in which things happen, so that
what fails shrinks and can be replayed. The rules are checked at each call of a handler and each write
(`stream_ledger.py`):

* at most one owner calls handlers under a fence, and calls of a fence all precede those of the next;
* cursors never go back, and of several keys none is saved without the others;
* no place of a stream is skipped without a record, none is handled twice under one fence, and again under a later one
  only if the agent before was killed, stood still or had no store, and nothing that the cursor had saved;
* an exclusive stream never has two connections, but for those of a process that cannot close its own;
* no lease is taken before its time, whatever clocks are set to;
* what a newer version wrote stays as it is;
* a lease is renewed only for a stream whose event loop runs and whose handler does not hang;
* when the faults end, each stream handles what is new, or was stopped, or has failed with a reason.

A newer version writes rows that these agents cannot read. A sweep reads three entries of a lane instead of ten
thousand, and such rows make lanes longer than that. The cursor is in the row, so the texts that cannot be read are
payloads. A fork is left out: no row tells of it, `test_queue_machine.py` forks the store, and a forked child
closes its copies of the connections (`tests/stores/test_forks.py`).

`THUNDER_TEST_STREAMS=400` runs so many random examples (48 of 50 steps each without it, which are the same in every
run), and shrinks what fails.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.simulation.stream_agents import SimProcess
from tests.simulation.stream_ledger import SETTLES
from tests.simulation.stream_world import HOURS_S, LARGE, LEASE_S, NEWER, NEWER_AGENTS, PAYLOADS, SETTINGS, World
from tests.support.streams import FeedThread, Log, fleet, follower
from thunderagent.model.task import Status
from thunderagent.testing.chaos import Behaviour, Close, Cut, HangUp, Refuse, Silence, Unanswered

EXAMPLES: Final = int(os.environ.get("THUNDER_TEST_STREAMS", "0"))
STEPS: Final = 50
MOST_AGENTS: Final = 4
MOST_NEWER: Final = 8

seen: Counter[str] = Counter()
"""What has happened in all examples, so that a run which tries nothing does not pass."""


class StreamMachine(RuleBasedStateMachine):
    """Four streams, up to four agents, and everything that can go wrong."""

    names = st.sampled_from(sorted(PAYLOADS))
    who = st.integers(0, MOST_AGENTS - 1)
    whiles = st.sampled_from([1.0, 4.0, 9.0, 25.0])

    def __init__(self) -> None:
        super().__init__()
        self.world: World

    @initialize(seed=st.integers(0, 2**20), agents=st.integers(1, 3), on_one_machine=st.booleans())
    def begin(self, seed: int, agents: int, on_one_machine: bool) -> None:
        self.world = World(seed, agents=agents, on_one_machine=on_one_machine)
        self.world.pass_time(4.0)

    # Peers

    @rule(name=names, count=st.integers(1, 12), kind=st.sampled_from(["plain", "plain", "slow", "hang", "boom"]))
    def publish(self, name: str, count: int, kind: str) -> None:
        for _ in range(count - 1):
            self.world.servers[name].publish("slow" if kind == "slow" else "plain")
        self.world.servers[name].publish(kind)
        self.world.pass_time(0.05)

    @rule(name=names, code=st.sampled_from([1000, 1001, 1006, 1008, 1011, 1012, 1013, 4001, None]))
    def peer_ends(self, name: str, code: int | None) -> None:
        ending = Close(code=code) if code not in (None, 1006) else Cut(reset=code is None)
        self.world.servers[name].drop_all(ending)
        self.world.pass_time(0.1)

    @rule(name=names)
    def peer_is_silent(self, name: str) -> None:
        self.world.servers[name].drop_all(Silence())
        self.world.pass_time(0.1)

    @rule(name=names, status=st.sampled_from([401, 429, 500, 503]), seconds=whiles)
    def peer_refuses(self, name: str, status: int, seconds: float) -> None:
        retry_after = 2 if status == 429 else None
        self._for_a_while(name, seconds, Refuse(status=status, retry_after=retry_after))

    @rule(name=names, seconds=whiles)
    def peer_is_away(self, name: str, seconds: float) -> None:
        self.world.servers[name].stop_listening()
        self._for_a_while(name, seconds, HangUp())

    @rule(name=names, mute=st.sampled_from(["handshake", "subscription"]), seconds=whiles)
    def peer_is_mute(self, name: str, mute: str, seconds: float) -> None:
        is_shy = mute == "handshake"
        self._for_a_while(name, seconds, Unanswered() if is_shy else self.world.healthy(name, acknowledgement=None))

    @rule(name=names, times=st.integers(1, 4))
    def peer_flaps(self, name: str, times: int) -> None:
        flap = self.world.healthy(name, ending=Cut(after_messages=1))
        self.world.script(name, *[flap] * times, self.world.healthy(name))
        self.world.servers[name].drop_all(Cut())
        self.world.servers[name].publish_many(times)
        self.world.pass_time(0.5)

    @rule(name=names, answers=st.booleans())
    def peer_repeats(self, name: str, answers: bool) -> None:
        again = self.world.healthy(name, duplicate_each=2, answers_close=answers, spacing_s=0.01)
        self.world.script(name, again, self.world.healthy(name))
        self.world.servers[name].drop_all(Close(code=1001))
        self.world.servers[name].publish_many(6)
        self.world.pass_time(0.5)

    @rule(name=names, count=st.integers(1, 3))
    def peer_loses_messages(self, name: str, count: int) -> None:
        self.world.skip(name, count)
        self.world.pass_time(0.2)

    @rule(name=names)
    def peer_forgets(self, name: str) -> None:
        self.world.servers[name].publish_many(2)
        self.world.servers[name].forget()
        self.world.servers[name].publish_many(1)
        self.world.pass_time(0.2)

    @rule(name=names)
    def peer_begins_an_epoch(self, name: str) -> None:
        self.world.new_epoch(name)
        self.world.servers[name].publish_many(2)
        self.world.pass_time(0.2)

    @rule(name=names)
    def peer_takes_nobody_else(self, name: str) -> None:
        """Whoever is connected stays so, and a successor is refused for longer than a handoff may take."""
        self._for_a_while(name, 25.0, Refuse(status=500), cut=False)
        self.hand_off(name)

    def _for_a_while(self, name: str, seconds: float, behaviour: Behaviour, *, cut: bool = True) -> None:
        self.world.script(name, behaviour)
        if cut:
            self.world.servers[name].drop_all(Cut())
        self.world.later(seconds, lambda: self.world.heal_peer(name))
        self.world.pass_time(0.3)

    # Agents

    def _agent(self, who: int) -> SimProcess | None:
        living = self.world.living
        return living[who % len(living)] if living else None

    @rule(who=who)
    def kill(self, who: int) -> None:
        if (process := self._agent(who)) is not None:
            self.world.kill(process)
            self.world.pass_time(0.1)

    @rule(who=who, seconds=st.sampled_from([1.0, 5.0, 8.5, 20.0]))
    def pause(self, who: int, seconds: float) -> None:
        if (process := self._agent(who)) is not None:
            process.pause(seconds)
            self.world.pass_time(0.1)

    @rule(
        who=who,
        seconds=st.sampled_from([2.0, 8.5, 60.0]),
        when=st.sampled_from(["now", "before", "after"]),
        is_busy=st.booleans(),
    )
    def machine_sleeps(self, who: int, seconds: float, when: str, is_busy: bool) -> None:
        """It is suspended, at once or in the middle of a call to the store; `is_busy`: with messages to handle."""
        if (process := self._agent(who)) is not None:
            for name in process.agent._in_flight.held.keys() & PAYLOADS.keys() if is_busy else ():
                self.world.servers[name].publish("slow")
                self.world.servers[name].publish_many(3)
            if is_busy:
                self.world.pass_time(0.05)
            if when == "now":
                process.sleep(seconds)
            else:
                process.store.sleeps[when] = seconds
            self.world.pass_time(0.1)

    @precondition(lambda self: self.world.on_one_machine)
    @rule(to=st.sampled_from([-1.0, 0.0, 1.0]))
    def clock_is_set(self, to: float) -> None:
        self.world.set_host_clock(to * HOURS_S)

    @rule(who=who, seconds=st.sampled_from([2.0, 14.0]))
    def block_the_event_loop(self, who: int, seconds: float) -> None:
        if (process := self._agent(who)) is not None:
            process.block_loop(seconds)
            self.world.pass_time(0.1)

    @rule(who=who)
    def leave(self, who: int) -> None:
        if (process := self._agent(who)) is not None and not process.is_leaving:
            process.leave()
            self.world.pass_time(0.1)

    @precondition(lambda self: len(self.world.living) < MOST_AGENTS)
    @rule()
    def join(self) -> None:
        self.world.join()
        self.world.pass_time(1.5)

    @rule(name=names)
    def hand_off(self, name: str) -> None:
        for process in self.world.living:
            self.world.hand_off(process, name)
        self.world.pass_time(0.2)

    @rule(
        who=who,
        kind=st.sampled_from(
            ["throttled", "lost request", "lost reply", "broken call", "no answer", "slow", "refused"]
        ),
        seconds=st.sampled_from([1.0, 4.0, 9.0, 20.0]),
    )
    def store_is_bad(self, who: int, kind: str, seconds: float) -> None:
        if (process := self._agent(who)) is not None:
            self.world.store_fault(process, kind, seconds)
            self.world.pass_time(0.1)

    @rule(name=st.sampled_from(LARGE), seconds=whiles, for_good=st.booleans())
    def a_payload_cannot_be_read(self, name: str, seconds: float, for_good: bool) -> None:
        """While another agent is to read it."""
        self.world.unreadable(name, seconds, for_good=for_good)
        self.hand_off(name)

    @precondition(lambda self: len(self.world.watch.newer) < MOST_NEWER)
    @rule(
        status=st.sampled_from(["RUNNING", "PENDING", "BLOCKED", "SLEEPING"]), attribute=st.sampled_from(sorted(NEWER))
    )
    def a_newer_version_puts_streams(self, status: str, attribute: str) -> None:
        """More than one sweep reads."""
        for _ in range(4):
            self.world.write_newer(status, attribute)

    @rule(number=st.integers(0, len(NEWER_AGENTS) - 1))
    def a_newer_agent_joins(self, number: int) -> None:
        self.world.announce_newer(number)

    @rule(name=names, seconds=whiles)
    def a_newer_version_wants_something(self, name: str, seconds: float) -> None:
        self.world.wish_newer(name, seconds)
        self.world.pass_time(0.1)

    # The application

    @rule(name=names, verb=st.sampled_from(["stop", "start", "start", "cancel"]))
    def command(self, name: str, verb: str) -> None:
        self.world.command(verb, name)
        self.world.pass_time(0.1)

    @rule(name=names)
    def stop_while_the_peer_is_away(self, name: str) -> None:
        """Whoever holds it is told within a heartbeat, and does not wait for its peer."""
        self.peer_is_away(name, 25.0)
        fence = self.world.told_to_stop(name)
        self.world.pass_time(5.0)
        if fence is not None and not self.world.was_disturbed(name, 5.5):
            task = self.world.task(name)
            assert (task.status, task.fence) != (Status.RUNNING, fence), f"{name} is not stopped: {task}"

    # Time

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 2.0, 3.0]))
    def a_moment_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([6.0, 10.0, 16.0]))
    def a_while_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    # The end

    def teardown(self) -> None:
        """Without faults every stream comes to an end, or goes on."""
        if not hasattr(self, "world"):
            return
        try:
            if sys.exc_info()[0] is None:
                self.world.calm()
                found = self.world.settle()
                self._check_wishes(found)
                self.world.pass_time(6.0)
                self.world.check_journals()
                self.world.check_newer()
                self._count(found)
        finally:
            self.world.close()

    def _check_wishes(self, found: dict[str, str]) -> None:
        for name, wish in self.world.wanted.items():
            if wish != "started":
                assert found[name] != "live", f"{name} was {wish} and runs"
            else:
                assert found[name] not in ("stopped", "cancelled"), f"nobody has {found[name]} {name}"

    def _count(self, found: dict[str, str]) -> None:
        ledger = self.world.ledger
        seen.update(one.partition(":")[0] for one in found.values())
        seen["calls"] += len(ledger.calls)
        seen["runs"] += len(ledger.runs)
        seen["gaps"] += sum(len(run.gaps) for run in ledger.runs.values())
        seen["repetitions"] += len(ledger.calls) - len({(call.task, call.place) for call in ledger.calls})


def test_the_rules_of_streams_hold_whatever_happens() -> None:
    seen.clear()
    run_state_machine_as_test(
        StreamMachine,
        settings=settings(
            max_examples=EXAMPLES or 24,
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            print_blob=True,
            phases=list(Phase) if EXAMPLES else [Phase.generate],  # to shrink takes minutes: not in every build
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what in ("live", "stopped", "gaps", "repetitions"):  # what is rarer has tests of its own
        assert seen[what], f"nothing tells of {what}: {seen}"


# What was found by the machine once, with the steps that are left when all others are taken away.

SEEDS: Final = range(8)
"""Orders in which the same steps are tried."""


@contextmanager
def a_world(seed: int, agents: int = 2, *, on_one_machine: bool = False, counts_sleep: bool = True) -> Iterator[World]:
    """Agents that hold all streams for a while; at the end every rule must have held."""
    world = World(seed, agents=agents, on_one_machine=on_one_machine, counts_sleep=counts_sleep)
    try:
        for name in PAYLOADS:
            world.servers[name].publish_many(4)
        world.pass_time(8.0)
        yield world
        world.check()
    finally:
        world.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_wakes_up_without_its_lease_connects_no_more(seed: int) -> None:
    with a_world(seed) as world:
        world.script("plain", Refuse(status=500))
        world.servers["plain"].drop_all(Cut())
        world.pass_time(0.5)
        world.holder("plain").pause(20.0)
        world.heal_peer("plain")
        world.pass_time(30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_release_comes_after_the_end_of_the_connection_even_if_the_event_loop_stands_still(seed: int) -> None:
    with a_world(seed) as world:
        holder = world.holder("plain")
        holder.block_loop(14.0)
        holder.leave()
        world.pass_time(30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_successor_has_read_of_an_older_epoch_is_not_handled_again(seed: int) -> None:
    with a_world(seed) as world:
        world.hand_off(world.holder("overlapping"), "overlapping")
        world.pass_time_until(lambda: world.waiting("overlapping"))
        world.servers["overlapping"].publish_many(2)  # the successor reads these, its predecessor goes on to the next
        world.pass_time(0.01)
        world.new_epoch("overlapping")
        world.servers["overlapping"].publish_many(3)
        world.pass_time(8.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_read_of_an_older_epoch_is_not_handled_after_a_snapshot_of_the_new_one(seed: int) -> None:
    with a_world(seed) as world:
        world.servers["reading"].publish("slow")
        world.pass_time(0.1)
        world.skip("reading", 1)
        world.pass_time(0.1)  # what follows the gap is read, and waits for the handler
        world.new_epoch("reading")
        world.servers["reading"].publish_many(2)
        world.pass_time(4.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_handler_that_hangs_is_cancelled_before_the_time_of_a_handoff_is_over(seed: int) -> None:
    with a_world(seed) as world:
        world.servers["reading"].publish("hang")
        world.pass_time(0.1)
        world.hand_off(world.holder("reading"), "reading")
        world.pass_time(30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_hands_over_too_late_does_not_move_the_cursor_back(seed: int) -> None:
    with a_world(seed) as world:
        holder = world.holder("overlapping")
        world.hand_off(holder, "overlapping")
        world.store_fault(holder, "no answer", 28.0)
        for _ in range(20):
            world.servers["overlapping"].publish("plain")
            world.pass_time(2.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("verb", ["cancel", "stop"])
def test_a_stream_that_was_started_again_runs(seed: int, verb: str) -> None:
    """Or the start was refused, as its agent was still about to end it."""
    with a_world(seed) as world:
        world.servers["plain"].publish("hang")
        world.pass_time(0.5 * seed)
        world.command(verb, "plain")
        for _ in range(20):
            world.command("start", "plain")
            if world.wanted["plain"] == "started":
                break
            world.pass_time(1.0)
        assert world.wanted["plain"] == "started"
        world.pass_time(20.0)
        world.calm()
        assert world.settle()["plain"] == "live"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_was_stopped_is_not_begun_again(seed: int) -> None:
    with a_world(seed) as world:
        world.servers["plain"].publish("hang")
        world.pass_time(0.1)
        world.hand_off(world.holder("plain"), "plain")
        world.command("stop", "plain")
        calls = len(world.ledger.calls)
        world.servers["plain"].publish_many(3)
        world.pass_time(25.0)
        assert world.task("plain").status is Status.DONE
        assert not [call for call in world.ledger.calls[calls:] if call.task == "plain"]


# Rules that a random example meets seldom.


@pytest.mark.parametrize("name", ["plain", "overlapping"])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_wakes_up_without_its_lease_handles_nothing_more(seed: int, name: str) -> None:
    with a_world(seed) as world:
        holder = world.holder(name)
        world.servers[name].publish("slow")
        world.servers[name].publish_many(5)
        world.pass_time(0.1)  # five messages have been read, and wait for the handler
        holder.pause(20.0)
        world.pass_time(25.0)
        assert world.holder(name) is not holder


@pytest.mark.parametrize("when", ["now", "before", "after"])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_whose_machine_slept_beyond_its_lease_handles_nothing_more(seed: int, when: str) -> None:
    with a_world(seed) as world:
        holder = world.holder("plain")
        if when == "now":
            holder.sleep(20.0)
        else:
            holder.store.sleeps[when] = 20.0
        world.servers["plain"].publish("slow")
        world.servers["plain"].publish_many(5)
        world.pass_time(30.0)
        assert world.holder("plain") is not holder


def test_on_a_clock_that_stands_still_while_a_machine_sleeps_two_agents_would_handle() -> None:
    """As on `time.monotonic`: these worlds must be able to show it."""

    with pytest.raises(AssertionError, match=r"a call after one of a later fence|a call while another is under way"):
        for seed in SEEDS:
            with a_world(seed, counts_sleep=False) as world:
                world.servers["plain"].publish("slow")
                world.servers["plain"].publish_many(5)
                world.pass_time(0.1)
                world.holder("plain").sleep(20.0)
                world.pass_time(30.0)


@pytest.mark.parametrize("for_good", [True, False])
@pytest.mark.parametrize("seed", SEEDS[:1])
def test_a_payload_that_cannot_be_read_keeps_no_other_stream_waiting(seed: int, for_good: bool) -> None:
    with a_world(seed) as world:
        world.unreadable("plain", 60.0, for_good=for_good)
        for process in world.living:
            world.kill(process)
        world.join()
        world.pass_time(25.0)
        others = PAYLOADS.keys() - {"plain"}
        assert {world.task(name).status for name in others} == {Status.RUNNING}
        calls = len(world.ledger.calls)
        for name in others:
            world.servers[name].publish("plain")
        world.pass_time(1.0)
        assert {call.task for call in world.ledger.calls[calls:]} == others


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_what_the_store_refuses_for_good_keeps_no_other_stream_waiting(seed: int) -> None:
    with a_world(seed) as world:
        for process in world.living[1:]:
            process.leave()
        world.pass_time(15.0)
        [process] = world.living
        world.store_fault(process, "refused", 20.0)
        world.servers["plain"].publish("boom")
        world.pass_time(40.0)
        world.calm()
        found = world.settle()
        assert {found[name] for name in PAYLOADS if not found[name].startswith("failed")} <= {"live"}


@pytest.mark.parametrize("is_bare_taken", [True, False])
def test_an_outcome_that_the_store_never_takes_ends_the_run_or_at_least_its_lease(is_bare_taken: bool) -> None:
    with a_world(0) as world:
        world.watch.never = lambda write: (
            write.task_id == "plain" and write.verb in SETTLES and (not is_bare_taken or "errors" in write.set)
        )
        fence = world.task("plain").fence
        world.servers["plain"].publish("boom")
        world.servers["plain"].publish("plain")
        world.pass_time(2 * LEASE_S + SETTINGS.sweep_s)
        task = world.task("plain")
        if is_bare_taken:
            assert (task.status, task.fence) == (Status.FAILED, fence)
            assert task.error is not None
            assert task.error.startswith("the store does not take its outcome (retry)")
        else:
            assert (task.status, task.fence) == (Status.RUNNING, fence + 1)
            assert world.ledger.most["plain"] == (1, 6)


@pytest.mark.parametrize("name", ["plain", "overlapping"])
def test_a_cursor_that_the_store_never_takes_costs_no_lease(name: str) -> None:
    with a_world(0) as world:
        world.watch.never = lambda write: (write.task_id, write.verb) == (name, "renew") and "lastSeq" in write.set
        before, connections = world.task(name), world.connections(name)
        for _ in range(20):
            world.servers[name].publish("plain")
            world.pass_time(1.0)
        after = world.task(name)
        assert (after.status, after.fence, after.last_seq) == (Status.RUNNING, before.fence, before.last_seq)
        assert world.connections(name) == connections
        assert world.ledger.most[name] == (1, 24)


@pytest.mark.parametrize("name", ["plain", "overlapping"])
def test_a_stream_whose_row_its_agent_cannot_read_for_a_while_goes_on(name: str) -> None:
    with a_world(0) as world:
        fence, connections = world.task(name).fence, world.connections(name)
        world.wish_newer(name, 3 * LEASE_S)
        for _ in range(20):
            world.servers[name].publish("plain")
            world.pass_time(1.0)
        task = world.task(name)
        assert (task.status, task.fence) == (Status.RUNNING, fence)
        assert world.connections(name) == connections
        assert world.ledger.most[name] == (1, 24)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clock_of_the_host_that_is_set_by_hours_ends_no_lease(seed: int) -> None:
    with a_world(seed, on_one_machine=True) as world:
        before = {name: world.task(name).fence for name in PAYLOADS}
        for number in range(12):
            world.set_host_clock((0.0, HOURS_S, -HOURS_S)[number % 3])
            world.pass_time(1.0)
        assert {name: world.task(name).fence for name in PAYLOADS} == before


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_without_a_store_leaves_before_another_connects(seed: int) -> None:
    with a_world(seed) as world:
        holder = world.holder("plain")
        world.store_fault(holder, "no answer", 20.0)
        world.pass_time(15.0)
        assert world.holder("plain") is not holder


@pytest.mark.parametrize("seed", SEEDS)
def test_a_successor_that_its_peer_refuses_waits_until_the_time_of_its_predecessor_is_over(seed: int) -> None:
    with a_world(seed) as world:
        world.script("overlapping", Refuse(status=500))
        world.later(12.0, lambda: world.heal_peer("overlapping"))
        world.hand_off(world.holder("overlapping"), "overlapping")
        for _ in range(30):
            world.servers["overlapping"].publish("plain")
            world.pass_time(1.0)


@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_a_peer_that_falls_silent_is_left_for_one_that_talks(name: str) -> None:
    with a_world(0) as world:
        world.servers[name].drop_all(Silence())
        world.servers[name].publish("plain")
        world.pass_time(20.0)
        assert world.ledger.most[name] == (1, 5)


# The same words with real threads, sockets and clocks, as far as they can be waited for.


def test_the_rules_hold_with_real_threads_too(tmp_path: Path) -> None:
    """Agents come and go, have no store for longer than a lease, and a peer drops them."""
    rng, log = random.Random(5), Log()
    jobs = (
        follower(log, "exclusive", lease_s=1.0, heartbeat_s=0.2),
        follower(log, "overlapping", exclusive=False, lease_s=1.0, heartbeat_s=0.2),
    )
    with fleet(tmp_path) as agents, FeedThread() as feed:
        for _ in range(3):
            agents.add(*jobs, clock_guard_s=0.3, sweep_s=0.5)
        for one in jobs:
            agents.client.enqueue(one, {"url": feed.url}, task_id=one.name)

        def all_handle(seq: int) -> None:
            log.wait(lambda: len({call.task for call in log.handled if call.seq == seq}) == len(jobs))

        last = first = feed.publish(1)
        all_handle(first)
        for step in ("drop", "no store", "leave", "join", "drop", "no store", "join", "leave"):
            living = [number for number, stage in enumerate(agents.stages) if stage.is_running]
            number = rng.choice(living)
            if step == "drop":
                feed.do(lambda: feed.server.drop_all(Cut()))
            elif step == "no store":
                agents.engines[number].outage()
            elif step == "leave" and len(living) > 1:
                agents.stages[number].stop()
            elif step == "join":
                agents.add(*jobs, clock_guard_s=0.3, sweep_s=0.5)
            last = feed.publish(3)
            if step == "no store":  # until the others have everything
                all_handle(last)
                agents.engines[number].outage(False)
        all_handle(last)
        for one in jobs:
            calls = [call for call in log.handled if call.task == one.name]
            fences = [call.fence for call in calls]
            assert fences == sorted(fences), "calls of a fence precede those of the next"
            for fence in set(fences):
                seqs = [call.seq for call in calls if call.fence == fence]
                assert seqs == list(range(seqs[0], seqs[0] + len(seqs))), "in one run nothing is skipped or repeated"
            assert {call.seq for call in calls} >= set(range(first, last + 1))
        assert feed.server.most_open["exclusive"] == 1
