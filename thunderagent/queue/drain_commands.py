"""Commands that have agents drain, so that their supervisors start fresh ones."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Final

from thunderagent.model.arguments import check, iterated, seconds_problem, text_problem
from thunderagent.model.errors import ConfigurationError, NotAllowed, WaitTimeout
from thunderagent.model.pacing import wait_delays
from thunderagent.model.task import Row
from thunderagent.model.unreadable import as_map, is_number
from thunderagent.queue.drains import PREFIX, drain_entry, drains_of, without_drains, without_old
from thunderagent.queue.pause_commands import LONGEST_NAME, PauseCommands, check_pause
from thunderagent.queue.pauses import Pause, PauseKind, info_of, names_of
from thunderagent.stores.tasks import AgentInfo

MOST_DRAINS: Final = 100
"""Agents that are asked to drain at one moment at most: every agent reads all of it, each time."""

FORGOTTEN_S: Final = 60.0
"""After so long the entry of an agent that was killed is taken away by who next asks one to drain."""

NAMED: Final = 10
"""Agents that an error names; of the others their number is told."""


class DrainCommands(PauseCommands):
    """What ends agents in good order. `Client` has these beside enqueue and wait."""

    def drain(self, agent: str, *, all_of_host: bool = False, reason: str | None = None) -> Sequence[AgentInfo]:
        """Have an agent stop to claim, finish or give back what it holds, and end with exit code 0.

        It sees that within `poll_min_s` seconds when it looks for work, and within 15 s when all of its slots are
        taken. Its supervisor starts a fresh one, which has another name. To ask again changes nothing.

        Args:
            agent: the name of an agent or the beginning of one name; with `all_of_host`, the name of a host.
            all_of_host: all agents that are alive on that host.
            reason: told by the agent in its log, and in its row.

        Returns:
            the agents that are asked, as they last told of themselves.

        Raises:
            NotAllowed: no such agent is alive, or too many drain already.
            ConfigurationError: the name fits several, or the reason is not one short line.
            StoreError: the store did not take it.
        """
        check(text_problem("agent", agent, most=LONGEST_NAME))
        check_pause(None, reason)
        alive = self.store.agents()
        asked = _named(agent, alive, all_of_host=all_of_host)
        now = self.store.clock.now()
        fresh = {f"{PREFIX}{one.name}": drain_entry(since=now, reason=reason) for one in asked}
        names = {one.name for one in alive}

        def change(row: Row | None) -> dict[str, Any] | None:
            drains, info = drains_of(row), info_of(row)
            gone = {f"{PREFIX}{name}" for name, at in drains.items() if name not in names and now - at > FORGOTTEN_S}
            kept = {key: entry for key, entry in without_old(info, now).items() if key not in gone}
            if fresh.keys() <= kept.keys() and not gone:
                return None
            changed = {**fresh, **kept}
            if sum(key.startswith(PREFIX) for key in changed) > MOST_DRAINS:
                raise NotAllowed(f"{MOST_DRAINS} agents are asked to drain already: wait until some of them are gone")
            return changed

        self._change_controls(change)
        for one in asked:
            self._let_look(Pause(kind=PauseKind.AGENT, name=one.name))
        return asked

    def wait_gone(self, agents: Sequence[AgentInfo | str], *, timeout_s: float) -> None:
        """Wait until agents have ended and said so, or are overdue.

        Args:
            agents: their names.
            timeout_s: longest wait; think of the `drain_s` of the agents, and of 15 s until they see it.

        Raises:
            WaitTimeout: some are still there; it says what they run.
            StoreError: the store did not answer.
        """
        check(seconds_problem("timeout_s", timeout_s, most=math.inf))
        several = [agents] if isinstance(agents, (str, AgentInfo)) else agents
        names = [_name_of(one) for one in iterated("agents", several)]
        until = time.monotonic() + timeout_s
        for delay_s in wait_delays():
            rows = self.store.engine.get([f"agent:{name}" for name in names])
            earliest = self.store.clock.leases.earliest()
            left = [row for row in rows.values() if is_number(at := row.get("expireAt")) and at > earliest]
            if not left:
                break
            if (left_s := until - time.monotonic()) <= 0:
                raise WaitTimeout(
                    f"not gone within {timeout_s:g} s: {_listing(list(map(_still, left)))}; the agents end within "
                    "their THUNDERAGENT_DRAIN_S once they see it, unless their version is too old to know drains"
                )
            time.sleep(min(delay_s, left_s))
        self._change_controls(without_drains(names))


def _named(name: str, alive: Sequence[AgentInfo], *, all_of_host: bool) -> list[AgentInfo]:
    """The agents that somebody means."""
    names = [one.name for one in alive]
    if not alive:
        raise NotAllowed(f"no agent is alive, so none is called {name!r}; see: thunderagent agents")
    if all_of_host:
        found = [one for one in alive if name == names_of(one.name)[1]]
        if not found:
            hosts = sorted({names_of(one)[1] for one in names})
            raise NotAllowed(f"no agent is alive on the host {name!r}; there are some on {_listing(hosts)}")
        return found
    found = [one for one in alive if one.name == name] or [one for one in alive if name and one.name.startswith(name)]
    if not found:
        raise NotAllowed(f"no live agent is called {name!r}, or begins so; alive are {_listing(names)}")
    if len(found) > 1:
        raise ConfigurationError(
            f"{name!r} is the beginning of {len(found)} agents: {_listing([one.name for one in found])}; write more of "
            "the one, or ask for all agents of a host with --all-of-host"
        )
    return found


def _name_of(agent: AgentInfo | str) -> str:
    name = agent.name if isinstance(agent, AgentInfo) else agent
    check(text_problem("the name of an agent", name, least=1, most=LONGEST_NAME))
    return name


def _still(row: Row) -> str:
    running = as_map(info_of(row).get("running"))
    number = sum(filter(is_number, running.values()))
    name = str(row["taskId"]).removeprefix("agent:")
    return f"{name} ({'1 task' if number == 1 else f'{number:g} tasks'})" if number else name


def _listing(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
