"""Every number of seconds that we decide to wait."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from thunderagent.model.arguments import check, seconds_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delay before a retry: full jitter, uniform between 0 and `base_s * 2 ** retries`, at most `cap_s`.

    With base 2 and cap 300 the upper ends are 2, 4, 8, 16, 32, 64, 128, 256, 300, 300 … seconds. Full jitter spreads
    tasks that failed together (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    """

    base_s: float = 2.0
    cap_s: float = 300.0

    def __post_init__(self) -> None:
        check(seconds_problem("base_s", self.base_s), seconds_problem("cap_s", self.cap_s))

    def delay(self, retries: int, rng: random.Random) -> float:
        """Seconds to wait after the retry number `retries`, counted from 0."""
        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(retries, 62))
        return rng.uniform(0.0, ceiling)


@dataclass(slots=True)
class PollPace:
    """How long a queue waits before it asks for work again.

    Work and room: at once. A part of a page: `min_s`. Nothing: grows by half each time to `max_s`, and after
    `off_peak_after_s` of nothing to `idle_s`; to `stretched_s`, if that is longer, while rings tell of new tasks. Every
    wait is jittered by a quarter so that agents do not march in step.
    """

    min_s: float
    max_s: float
    idle_s: float
    off_peak_after_s: float = 300.0
    stretched_s: float = 0.0
    _last_s: float = 0.0
    _empty_s: float = 0.0

    def after(self, found: int, *, more: bool, rng: random.Random) -> float:
        """Seconds to wait after a poll that claimed `found` tasks; `more`: it saw work it had room for."""
        if found:
            self._empty_s = 0.0
            self._last_s = self.min_s
            return 0.0 if more else jittered(self.min_s, rng)
        longest_s = max(self.max_s, self.stretched_s)
        self._last_s = min(longest_s, self._last_s * 1.5) if self._last_s else self.min_s
        if self._empty_s >= self.off_peak_after_s:
            self._last_s = max(self.idle_s, self.stretched_s)
        self._empty_s += self._last_s
        return jittered(self._last_s, rng)


def jittered(seconds: float, rng: random.Random) -> float:
    """The seconds less up to a quarter of them."""
    return seconds * (1.0 - 0.25 * rng.random())


def first_poll(rng: random.Random, min_s: float) -> float:
    """Random delay of an agent's first poll, so that a fleet that starts together does not poll together.

    It is 1 to 3 s, and for agents that may poll more often than each second (`min_s`) as much shorter.
    """
    return rng.uniform(1.0, 3.0) * min(1.0, min_s)


def outage_delays(rng: random.Random, cap_s: float = 30.0) -> Iterator[float]:
    """Waits between attempts to reach a store that does not answer: 0.5 s doubling to `cap_s`, jittered."""
    seconds = 0.5
    while True:
        yield jittered(seconds, rng)
        seconds = min(cap_s, seconds * 2)


def unread_delay(times: int, rng: random.Random) -> float:
    """Wait of a task whose payload could not be read for the `times`-th time: 2 s doubling to 300 s, jittered."""
    return jittered(min(300.0, 2.0 ** min(times, 10)), rng)


def text_delay(times: int, rng: random.Random) -> float:
    """Wait of an outcome whose text could not be written for the `times`-th time: 0.5 s doubling to 30 s, jittered."""
    return jittered(min(30.0, 0.25 * 2.0 ** min(times, 10)), rng)


TEXT_WAITS_S: Final = 600.0
"""How long an outcome waits for its text to be written; then it is written without."""

TEXT_WAITS_CLOSING_S: Final = 1.0
"""Longest pause between two attempts to write such a text while the agent drains."""

TEXTS_FAIL_S: Final = 2.0
"""How long texts that cannot be written may hold up one turn of the loop; the others of that turn are not begun."""


def wait_delays() -> Iterator[float]:
    """Waits between looks at a task that a client waits for: 50 ms growing by half to 2 s."""
    seconds = 0.05
    while True:
        yield seconds
        seconds = min(2.0, seconds * 1.5)


def lock_pause(waited_s: float, rng: random.Random) -> float:
    """Pause before the next attempt to get the lock of a file that another process has had for `waited_s` seconds.

    Short and random, so that of all who wait each has the same chance. Little longer after a long wait: on a busy
    machine, one that asks less often the longer it waits would never get it.
    """
    return rng.uniform(0.0002, min(0.006, max(0.003, waited_s / 50)))


def batch_delays(rng: random.Random) -> Iterator[float]:
    """Waits before unprocessed members of a batch are sent again: 50 ms doubling to 5 s, full jitter."""
    ceiling = 0.05
    while True:
        yield rng.uniform(0.0, ceiling)
        ceiling = min(5.0, ceiling * 2)


PASSING: Final = Backoff(base_s=0.2, cap_s=10.0)
"""Before a client of the WebSocket API sends a change again that was not answered, or could not be taken for now."""

PASSING_LEAST_S: Final = 0.01
"""… and the least of it."""

OVERTAKEN: Final = Backoff(base_s=0.05, cap_s=2.0)
"""Before it sends a change again that those of others have overtaken twice."""

LONGEST_PAUSE_S: Final = 30.0
"""An API that asks a client for a longer pause is asked again after this."""

ASK_AGAIN_S: Final = 0.1
"""Before it asks again for a state that it was not told."""

THROTTLED_S: Final = 2.0
"""Longest wait of an agent after a throttle."""

HEARTBEAT_RETRY_S: Final = 1.0
"""After a heartbeat that got no answer: the next attempt, until the deadline of the lease."""

GATHER_S: Final = 0.002
"""Longest wait of the settler for company while outcomes are arriving fast."""

HURRY_S: Final = 2.0
"""How long a handler that was told to stop may take before its task is released without it."""

KILL_GRACE_S: Final = 5.0
"""How long a child process may take to end after it was asked, before it is killed."""

DESCENDANTS_END_S: Final = 1.0
"""How long processes of handlers may take to end after SIGTERM when their agent ends, before they are killed."""

OTHER_CODE_S: Final = 60.0
"""How long a task waits whose child process found code of an older version on the disk than its agent has."""

CONTROL_LOOK_S: Final = 10.0
"""An agent that did not look for work for so long reads what is paused, and whether it is asked to drain."""

RECYCLE_LOOK_S: Final = 5.0
"""Time between two looks of an agent whether it is time for a fresh one."""

STUCK_WAIT_S: Final = 60.0
"""Pause between warnings about a handler that runs on after its time limit or its lost lease."""

LOOP_JOIN_S: Final = 1.0
"""Longest wait for the event loop to end after a drain: with `HURRY_S` under the 5 s that a supervisor adds to it."""

HEARTBEAT_JOIN_S: Final = 1.0
"""Longest wait for the heartbeat to end, which holds nothing then: a reply under way is of no use any more."""

FLOOR_S: Final = 0.1
"""No peer sees two attempts of one stream closer together than this, unless the first end was planned."""

SPREAD_S: Final = (5.0, 30.0)
"""Wait before the return to a peer that restarts and said so."""

SLOW_S: Final = 30.0
"""Least wait before the return to a peer that has too much to do."""

LOOP_LATE_S: Final = 5.0
"""An event loop that has not ticked for so long does not hold streams any more: their leases are not renewed."""

LOOP_TICK_S: Final = 0.5
"""Time between two ticks of an event loop."""

HANDOFF_S: Final = 15.0
"""How long a stream is handled on after it was offered, while a successor connects."""

STREAM_LOOK_S: Final = 0.5
"""Time between two looks at streams that are being handed over."""

OTHERS_S: Final = 2.0
"""How long a stream is left to the agent whose share it is."""

LOST_LOOK_S: Final = 1.0
"""Time between two looks at streams whose lease should be over; the index is read less often."""

STREAM_POLL_S: Final = 1.0
"""Longest pause between polls for streams, so that one that was handed off is claimed within a second or so."""


LINE_KEPT_S: Final = 60.0
"""A line that was spoken for within this time need not be spoken for again when one more task comes to stand in it."""

LINE_CLOSES_S: Final = 600.0
"""A line is closed when it is empty and nobody has spoken for it for so long: ten times longer than any write takes."""

LINE_AGAIN_S: Final = (0.25, 1.0)
"""Waits before a line is looked at again that seemed to have nobody for a free slot: the index may be late."""

LINE_TRIED_S: Final = 5.0
"""How long an entry of a line that somebody else has claimed is not tried again: the index shows it for a while."""

TURN_AHEAD_S: Final = 30.0
"""A turn that ends so much later than one which begins now would is no turn: clocks of agents do not differ so much."""

SLOTS_SEEN_S: Final = 1.0
"""How long it is taken for true that all slots of a limit are taken; who is wrong about it looks again at once."""

UNDECIDED_S: Final = 2.0
"""A task goes back to its queue for so long when the store could not say whether a slot of its limit is free."""

SLOT_REFUSED_S: Final = 15.0
"""A task goes back to its queue for so long when the store never takes the row of its limit with one more slot."""

LINE_SWEEP_S: Final = 2.0
"""How long one sweep of the lines may hold up an agent's loop."""


KEY_DOUBT_S: Final = 30.0
"""Who took a unique key so long ago takes it anew before he puts his task."""

KEY_SETTLES_S: Final = 60.0
"""A task whose unique key was taken so long ago is not put any more: `KEY_DOUBT_S`, and longer than a request takes."""

TEXT_SETTLES_S: Final = 600.0
"""A payload that was written so lately stays when its row is deleted: the row of an equal task may still come."""

TEXT_DOUBT_S: Final = 300.0
"""An enqueue that took so long writes its payloads once more: `TEXT_SETTLES_S` may be over before its rows came."""

LISTEN_S: Final = 20.0
"""Longest wait for a ring before the listener looks around."""

EAGER_POLL_S: Final = 0.005
"""Between two looks into the queue of a local engine, while rings come."""

STAND_BACK_S: Final = 0.15
"""How long an agent lets the others ask for a ring that is of no use here before it asks again."""

SHY_S: Final = 0.05
"""How long an agent leaves a task to the one whose share it is, when all have heard the same ring."""

AHEAD_S: Final = (0.5, 1.5)
"""The same for a task that all have seen in the index before it was due."""

MISSED_S: Final = 1.0
"""A poller whose ring could not be followed looks again within this time."""

BEAT_AGAIN_S: Final = 1.0
"""Shortest time between two renewals of one lease that rings asked for."""

RELAY_S: Final = 1.0
"""Shortest time between two rings by which a busy agent tells others of children that it has let go."""

HOOKS_END_S: Final = 2.0
"""How long events that wait for hooks are worked off when an agent ends."""

HOOK_TOLD_S: Final = 60.0
"""Shortest time between two complaints about one hook."""

LINES_END_S: Final = 1.0
"""How long a process that ends waits for a reader to take its last lines."""

LINES_LOOK_S: Final = 0.01
"""Time between two looks whether it has."""

PROBE_S: Final = 5.0
"""Longest wait for more of a request at the port for probes; the whole request may take twice as long."""

NOTICES_S: Final = 5.0
"""Time between two questions to an EC2 instance whether it is to be taken away; a spot one tells two minutes before,
and of hibernation in the moment in which it begins."""

NOTICES_RARELY_S: Final = 60.0
"""The same when it does not answer."""

LISTENER_JOIN_S: Final = 0.5
"""Longest wait for the listener to end: a long poll under way cannot be broken off, and holds nothing up."""


TICK_LOOK_S: Final = 5.0
"""Longest pause between two looks at the clock for ticks of periodic jobs; no row is read for it."""

SCHEDULE_LOOK_S: Final = 900.0
"""Longest time between two readings of the row of a schedule of which no tick is due."""

STOPPING_LOOK_S: Final = 2.0
"""Time between two looks whether a cancelled task has ended for whose end a tick waits."""

TICK_OTHERS_S: Final = (0.5, 1.0)
"""How long a tick is left to the agent whose turn it is, so that a fleet does not race for it."""

TICK_RESUME_S: Final = 3.0
"""How long ticks that another agent has decided may take to be put, before we put them."""

EXAMINED_S: Final = 15.0
"""How long one check of `thunderagent doctor` may take; then it is told and left behind."""


def reconnect_delay(failures: int, base_s: float, cap_s: float, rng: random.Random) -> float:
    """Seconds before the next attempt to connect: full jitter, as `Backoff`, but at least `FLOOR_S`."""
    return max(FLOOR_S, Backoff(base_s=base_s, cap_s=cap_s).delay(failures, rng))


REGION_LOOK_S: Final = 5.0
"""Time between two readings of the arbiter's row by an agent."""


CANARY_FIRST_S: Final = 2.0
"""Time between two attempts of a canary while nothing is known of its own region, so that an agent knows it soon."""

CANARY_END_S: Final = 1.0
"""Longest wait for a canary's attempt to end that was broken off."""


REGION_HURRY_S: Final = 10.0
"""What the agents of a region have beside `drain_s` to give back what they hold before the grant goes on."""
