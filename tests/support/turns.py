"""Actors that take turns at an engine: every order of their calls can be tried, and each can die before any call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.engine import LONG_S
from thunderagent.stores.engine import Engine

CALLS: Final = ("put", "apply", "get", "page", "count", "lanes", "delete", "put_texts", "get_texts")


class Killed(BaseException):
    """The process of an actor is gone; nothing of it catches this."""


class Turns:
    """Lets one actor at a time go on, from one call of its engine to the next.

    Args:
        choose: of the actors that wait before a call, who goes on. A name with a minus in front dies instead.
        after_each: called after each call, while everybody waits.
    """

    def __init__(self, choose: Callable[[Sequence[str]], str], after_each: Callable[[], None] = lambda: None) -> None:
        self._choose = choose
        self._after_each = after_each
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        self._running = 0
        self._next: str | None = None
        self._doomed: set[str] = set()
        self._names = threading.local()

    def run(self, actors: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run all actors to their ends; what each answered, or the exception that ended it."""
        answers: dict[str, Any] = {}

        def act(name: str, action: Callable[[], Any]) -> None:
            self._names.value = name
            try:
                answers[name] = action()
            except BaseException as error:
                answers[name] = error
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

        self._running = len(actors)
        threads = [threading.Thread(target=act, args=one, daemon=True) for one in actors.items()]
        for thread in threads:
            thread.start()
        while True:
            with self._changed:
                assert self._changed.wait_for(lambda: self._running == 0, LONG_S), "an actor does not come to its call"
                self._after_each()
                if not self._waiting:
                    break
                chosen = self._choose(sorted(self._waiting))
                if chosen.startswith("-"):
                    chosen = chosen[1:]
                    self._doomed.add(chosen)
                self._waiting.remove(chosen)
                self._next = chosen
                self._running += 1
                self._changed.notify_all()
        for thread in threads:
            thread.join(LONG_S)
        return answers

    def step(self) -> None:
        """An actor is about to make a call; who is no actor goes on at once."""
        name = getattr(self._names, "value", None)
        if name is None:
            return
        with self._changed:
            self._waiting.add(name)
            self._running -= 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._next == name, LONG_S), f"{name} does not get its turn"
            self._next = None
            if name in self._doomed:
                raise Killed(name)


class TurnsEngine:
    """An engine before whose calls actors wait for their turns."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self._engine = engine
        self._turns = turns

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._engine, name)
        if name not in CALLS:
            return member

        def call(*values: Any, **options: Any) -> Any:
            self._turns.step()
            return member(*values, **options)

        return call


@dataclass
class EveryOrder:
    """Goes through every order of calls, and through every death: the last choice that has another left is changed.

    Args:
        switches: how often, at most, an actor is interrupted that could go on. Few are enough to find what is wrong,
            and without a bound two actors that outdo each other have orders without end.
        mortal: of these actors one at most dies in each order.
    """

    switches: int
    mortal: frozenset[str] = frozenset()
    tried: int = 0
    _path: list[tuple[int, int]] = field(default_factory=list)
    _depth: int = 0
    _left: int = 0
    _last: str = ""
    _is_dead: bool = False

    def next(self) -> bool:
        """Prepare the next order; False when all were tried."""
        if self.tried:
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return False
            chosen, number = self._path[-1]
            self._path[-1] = (chosen + 1, number)
        self.tried += 1
        self._depth, self._left, self._last, self._is_dead = 0, self.switches, "", False
        return True

    def choose(self, waiting: Sequence[str]) -> str:
        """The choice that this order has at this point."""
        goes_on = self._last in waiting
        choices = [self._last] if goes_on else []
        choices += [name for name in waiting if name != self._last and (self._left or not goes_on)]
        choices += [f"-{name}" for name in waiting if name in self.mortal and not self._is_dead]
        if self._depth == len(self._path):
            self._path.append((0, len(choices)))
        chosen, number = self._path[self._depth]
        assert number == len(choices), "the actors do not do the same in the same order"
        self._depth += 1
        choice = choices[chosen]
        if choice.startswith("-"):
            self._is_dead = True
        else:
            self._left -= goes_on and choice != self._last
            self._last = choice
        return choice
