"""An event loop whose clock jumps: an hour of waiting in a test costs milliseconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from types import CoroutineType
from typing import Any, Final, TypeVar

from thunderagent.model.errors import WaitTimeout

T = TypeVar("T")

QUIET_S: Final = 0.02
_END_S: Final = 5.0


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for its timers.

    When nothing is ready and the next timer is in the future, the loop waits for input and output for `quiet_s` real
    seconds. If none comes, nothing can happen before that timer, and `time()` moves forward to it. Between two jumps
    the clock is the real one.

    This holds only for peers in the same loop, such as a `ChaosServer`, whose data is there at once. A process, a
    thread or a remote host needs real time: a jump ends a timeout before its answer can come. While
    `run_in_executor` or `asyncio.to_thread` runs, the clock does not jump. The clocks of the module `time` never jump.
    Each jump costs `quiet_s`; 1 ms is enough for loopback on an idle machine.
    """

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._clock = _JumpingSelector(quiet_s, self._give_up)
        super().__init__(self._clock)

    @property
    def jumps(self) -> int:
        return self._clock.jumps

    def time(self) -> float:
        return time.monotonic() + self._clock.ahead_s

    def limit(self, real_s: float) -> None:
        """Raise `WaitTimeout` out of the loop after so many real seconds."""
        self._clock.real_until = time.monotonic() + real_s
        self._limit_s = real_s

    def run_in_executor(  # type: ignore[override]  # a coroutine in the stubs, a future in the library
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """As in every loop; the clock does not jump while it runs."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._clock.in_threads += 1
        future.add_done_callback(self._came_back)
        return future

    async def shutdown_default_executor(self, *args: Any, **options: Any) -> None:
        """As in every loop; the clock does not jump while its threads end."""
        self._clock.in_threads += 1
        try:
            await super().shutdown_default_executor(*args, **options)
        finally:
            self._clock.in_threads -= 1

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._clock.in_threads -= 1

    def _give_up(self) -> None:
        tasks = "".join(f"\n  {task.get_name()}: {_whereabouts(task)}" for task in asyncio.all_tasks(self)) or " none"
        raise WaitTimeout(f"not done within {self._limit_s:g} real seconds; the open tasks are:{tasks}")


def run_fast(main: Coroutine[Any, Any, T], *, limit_s: float = 60.0, quiet_s: float = QUIET_S) -> T:
    """Run a coroutine as `asyncio.run` does, on a `FastLoop`: its rule and its limits hold.

    At the end leftover tasks are cancelled, and asynchronous generators and the executor are shut down.

    Args:
        limit_s: real seconds that it may take. A callback that never returns cannot be interrupted.
        quiet_s: real seconds without input or output before the clock jumps.

    Raises:
        WaitTimeout: it took longer; the message names the open tasks.
    """
    with asyncio.Runner(loop_factory=partial(FastLoop, quiet_s)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, FastLoop)
        loop.limit(limit_s)
        try:
            return runner.run(main)
        finally:
            loop.limit(_END_S)


def _whereabouts(task: asyncio.Task[Any]) -> str:
    """The coroutines of a task with their lines, the innermost last."""
    found: list[str] = []
    one: object = task.get_coro()
    while isinstance(one, CoroutineType) and one.cr_frame:
        found.append(f"{one.__qualname__} (line {one.cr_frame.f_lineno} of {Path(one.cr_code.co_filename).name})")
        one = one.cr_await
    return " > ".join(found)


class _JumpingSelector(selectors.BaseSelector):
    """Waits for input and output, and moves the clock instead of waiting for a timer."""

    def __init__(self, quiet_s: float, give_up: Callable[[], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._quiet_s = quiet_s
        self._give_up = give_up
        self.ahead_s = 0.0
        self.jumps = 0
        self.in_threads = 0
        self.real_until: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        before = time.monotonic()
        if self.real_until is not None and before >= self.real_until:
            self.real_until = None
            self._give_up()
        if timeout is None or self.in_threads or timeout <= self._quiet_s:
            return self._real.select(self._within_limit(timeout, before))
        ready = self._real.select(self._within_limit(self._quiet_s, before))
        if not ready:
            self.ahead_s += max(0.0, timeout - (time.monotonic() - before))
            self.jumps += 1
        return ready

    def _within_limit(self, real_s: float | None, now: float) -> float | None:
        """These seconds, or what is left of the limit."""
        if self.real_until is None:
            return real_s
        left_s = self.real_until - now
        return left_s if real_s is None else min(real_s, left_s)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
