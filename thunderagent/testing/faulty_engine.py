"""An engine that fails on request: loses requests and replies, throttles, shows old pages of the index."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeVar

from thunderagent.model.clock import SharedClock
from thunderagent.model.conditions import Write
from thunderagent.model.errors import ConfigurationError, StoreError, StoreRejected, StoreThrottled, StoreUnavailable
from thunderagent.model.forks import renewed
from thunderagent.model.task import Lane, Page, Row
from thunderagent.stores.engine import Applied, Engine, KeptText, Overdue

T = TypeVar("T")

ANY: Final = "*"
_PAGES_KEPT: Final = 8


class Fault(StrEnum):
    """The fault of a request.

    * `LOST_REQUEST`: it is not done, and there is no answer.
    * `LOST_REPLY`: it is done, and there is no answer.
    * `REPEATED`: it is done, the reply is lost, and the SDK repeats it: the answer is the second one.
    * `THROTTLED`: it is not done, as there were too many.
    * `BROKEN_CALL`: it is done, and the whole call raises.
    * `SERVER_ERROR`: it is not done, and the answer is an error of the server (5xx).
    * `REJECTED`: it is not done and never will be.
    * `STALE`: the page is the oldest kept of the same query.
    """

    LOST_REQUEST = "lost request"
    LOST_REPLY = "lost reply"
    REPEATED = "repeated"
    THROTTLED = "throttled"
    BROKEN_CALL = "broken call"
    SERVER_ERROR = "server error"
    REJECTED = "rejected"
    STALE = "stale"


_NOT_DONE: Final = (Fault.LOST_REQUEST, Fault.THROTTLED, Fault.SERVER_ERROR, Fault.REJECTED)

VERBS: Final = (
    "enqueue",
    "claim",
    "renew",
    "succeed",
    "retry",
    "snooze",
    "fail",
    "close",
    "release",
    "take_over",
    "give_up",
    "cancel",
    "request_cancel",
    "stop",
    "parent_done",
    "unpark",
    "register_dependent",
    "revive",
    "take_permit",
    "release_permit",
    "wait_for_permit",
    "get",
    "page",
)
"""Verbs for the methods named after faults; `ANY` stands for all."""


class FaultyEngine:
    """An engine in front of another that loses requests and replies, throttles, and shows stale pages.

    Faults are named by verb: that of a `Write` ("claim", "renew", "succeed", …) or the name of a method of the port
    ("put", "get", "page", "delete", …); `ANY` stands for all of them.
    """

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._guard = renewed(threading.RLock())
        self._script: dict[str, deque[Fault]] = defaultdict(deque)
        self._chances: dict[tuple[str, Fault], float] = {}
        self._pages: dict[Any, deque[Page]] = {}
        self._down = renewed(threading.Event())
        self._down_until = [math.inf]  # siblings share it
        self.hits: list[tuple[str, Fault]] = []
        """Faults that happened, in order."""

    def fail(self, verb: str, *faults: Fault) -> None:
        """Let the next requests of a verb have these faults, one each."""
        with self._guard:
            self._script[verb].extend(faults)

    def forget(self, verb: str, fault: Fault) -> None:
        """Remove what `fail` scripted and has not happened."""
        with self._guard:
            self._script[verb] = deque(one for one in self._script[verb] if one is not fault)

    def drop_before_commit(self, verb: str, times: int = 1) -> None:
        """Lose the next requests of a verb: nothing is done, and there is no answer."""
        self.fail(_named(verb), *[Fault.LOST_REQUEST] * times)

    def drop_after_commit(self, verb: str, times: int = 1) -> None:
        """Lose the next replies to a verb: it is done, and there is no answer."""
        self.fail(_named(verb), *[Fault.LOST_REPLY] * times)

    def throttle(self, verb: str, times: int = 1) -> None:
        """Refuse the next requests of a verb as too many: nothing is done."""
        self.fail(_named(verb), *[Fault.THROTTLED] * times)

    def server_error(self, verb: str, times: int = 1) -> None:
        """Answer the next requests of a verb with an error of the server (5xx): nothing is done."""
        self.fail(_named(verb), *[Fault.SERVER_ERROR] * times)

    def reject(self, verb: str, times: int = 1) -> None:
        """Refuse the next requests of a verb for good, as for a row that is too large: nothing is done."""
        self.fail(_named(verb), *[Fault.REJECTED] * times)

    def stale_index(self, times: int = 1) -> None:
        """Answer the next reads of the index with earlier pages, if there were any."""
        self.fail("page", *[Fault.STALE] * times)

    @property
    def left(self) -> list[tuple[str, Fault]]:
        """Scripted faults that have not happened: the test may not have tested what it says."""
        with self._guard:
            return [(verb, fault) for verb, faults in self._script.items() for fault in faults]

    def chance(self, verb: str, fault: Fault, probability: float) -> None:
        """Let every request of a verb have this fault by chance."""
        self._chances[verb, fault] = probability

    def outage(self, down: bool = True, *, for_s: float = math.inf) -> AbstractContextManager[object]:
        """Answer nothing from now on; with `down=False` everything again.

        Args:
            down: False ends the outage.
            for_s: seconds of the shared clock after which it ends by itself.

        Returns:
            a context that ends the outage.
        """
        self._down_until[0] = self.clock.now() + for_s
        (self._down.set if down else self._down.clear)()
        ending = ExitStack()
        ending.callback(lambda: self.outage(False))
        return ending

    @property
    def behind(self) -> Engine:
        return self._engine

    def calm(self) -> None:
        self._down.clear()
        self._script.clear()
        self._chances.clear()

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def clock(self) -> SharedClock:
        return self._engine.clock

    @property
    def inline_bytes(self) -> int:
        return self._engine.inline_bytes

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        return self._each(["put"] * len(rows), rows, partial(self._engine.put, fresh=fresh))

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return self._each([write.verb for write in batch], batch, self._engine.apply)

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        return self._once("get", lambda: self._engine.get(task_ids))

    def page(self, status_value: str, **options: Any) -> Page:
        key = status_value, options.get("limit"), repr(options.get("after")), options.get("newest_first", False)
        kept = self._pages.setdefault(key, deque(maxlen=_PAGES_KEPT))
        fault = self._next("page")
        if fault is Fault.STALE and kept:
            return kept[0]
        fresh = _do("page", fault, lambda: self._engine.page(status_value, **options))
        kept.append(fresh)
        return fresh

    @property
    def most_counted(self) -> int | None:
        return self._engine.most_counted

    def count(self, status_value: str, *, until: float | None = None, most: int | None = None) -> int:
        return self._once("count", lambda: self._engine.count(status_value, until=until, most=most))

    def lanes(self, strange: Callable[[str], None] = lambda suffix: None) -> list[Lane]:
        return self._once("lanes", lambda: self._engine.lanes(strange))

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        return self._once("delete", lambda: self._engine.delete(tasks))

    def expire(self, now: float) -> int:
        return self._once("expire", lambda: self._engine.expire(now))

    def overdue(self, now: float) -> Overdue | None:
        return self._once("overdue", lambda: self._engine.overdue(now))

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        self._once("put_texts", lambda: self._engine.put_texts(texts, expire_at=expire_at))

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        return self._once("get_texts", lambda: self._engine.get_texts(keys))

    def check(self) -> None:
        self._once("check", self._engine.check)

    def sibling(self) -> FaultyEngine:
        """The sibling of the engine behind, with the same faults."""
        inner = self._engine.sibling()
        if inner is self._engine:
            return self
        other = copy.copy(self)
        other._engine = inner
        return other

    def close(self) -> None:
        self._engine.close()

    def _next(self, verb: str) -> Fault | None:
        with self._guard:
            fault: Fault | None = None
            if self._down.is_set() and self.clock.now() >= self._down_until[0]:
                self._down.clear()
            if self._down.is_set():
                fault = Fault.LOST_REQUEST
            elif script := self._script.get(verb) or self._script.get(ANY):
                fault = script.popleft()
            else:
                for (name, one), probability in self._chances.items():
                    if name in (verb, ANY) and self._rng.random() < probability:
                        fault = one
                        break
            if fault is not None:
                self.hits.append((verb, fault))
            return fault

    def _once(self, verb: str, call: Callable[[], T]) -> T:
        return _do(verb, self._next(verb), call)

    def _each(
        self, verbs: Sequence[str], members: Sequence[T], call: Callable[[Sequence[T]], list[Applied]]
    ) -> list[Applied]:
        faults = [self._next(verb) for verb in verbs]
        sent = [member for member, fault in zip(members, faults, strict=True) if fault not in _NOT_DONE]
        answers = iter(call(sent) if sent else ())
        outcomes = []
        for verb, member, fault in zip(verbs, members, faults, strict=True):
            answer = Applied(won=False) if fault in _NOT_DONE else next(answers)
            if fault is Fault.REPEATED:
                [answer] = call([member])
            elif fault is not None and fault is not Fault.STALE:
                answer = Applied(won=False, error=_error(verb, fault))
            outcomes.append(answer)
        if Fault.BROKEN_CALL in faults:
            raise _error(verbs[faults.index(Fault.BROKEN_CALL)], Fault.BROKEN_CALL)
        return outcomes


def _named(verb: str) -> str:
    """The verb of a write, or the method of the port, of a name."""
    name = verb.replace(" ", "_")
    if verb != ANY and name not in VERBS:
        raise ConfigurationError(f"no request is called {verb!r}; use one of {', '.join(VERBS)}, or {ANY!r}")
    return {"enqueue": "put"}.get(verb, name.replace("_", " "))


def _do(verb: str, fault: Fault | None, call: Callable[[], T]) -> T:
    if fault in _NOT_DONE:
        raise _error(verb, fault)
    answer = call()
    if fault in (Fault.LOST_REPLY, Fault.BROKEN_CALL):
        raise _error(verb, fault)
    return call() if fault is Fault.REPEATED else answer


def _error(verb: str, fault: Fault | None) -> StoreError:
    kinds: dict[Fault | None, type[StoreError]] = {Fault.THROTTLED: StoreThrottled, Fault.REJECTED: StoreRejected}
    return kinds.get(fault, StoreUnavailable)(f"injected: {fault} of {verb}")
