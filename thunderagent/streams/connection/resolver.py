"""Looks names up in threads of its own, once for several lookups of a name at one moment."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from dataclasses import dataclass
from typing import Final

THREADS: Final = 32
"""Lookups at one moment; one that was given up goes on in its thread."""


@dataclass(slots=True)
class _Lookup:
    answer: asyncio.Future[list[str]]
    since: float


class Resolver:
    """Looks names up. Answers are not kept: the next attempt finds a peer that moved.

    The loop's executor does not serve: 40 slow lookups held up everything else for seconds (measured), and the
    interpreter joins its threads at the exit, so that a dead name server delays the end of an agent.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], _Lookup] = {}
        self._running = 0

    async def addresses(self, host: str, port: int, timeout_s: float) -> list[str]:
        """The present addresses of a host.

        Raises:
            OSError: there is none, the lookup took too long, or too many others have not ended.
        """
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            pass
        now = asyncio.get_running_loop().time()
        lookup = self._under_way.get((host, port))
        if lookup is None or now - lookup.since > timeout_s:
            lookup = self._start(host, port, now)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(lookup.answer)
        except TimeoutError:
            raise TimeoutError(f"the name {host} was not resolved in {timeout_s:g} s") from None

    def _start(self, host: str, port: int, now: float) -> _Lookup:
        if self._running >= THREADS:
            raise OSError(f"{THREADS} lookups of other names have not ended: the name server does not answer")
        loop = asyncio.get_running_loop()
        lookup = self._under_way[host, port] = _Lookup(loop.create_future(), now)
        lookup.answer.add_done_callback(_seen)
        self._running += 1

        def ended(found: list[str], error: OSError | None) -> None:
            self._running -= 1
            if self._under_way.get((host, port)) is lookup:
                del self._under_way[host, port]
            if lookup.answer.done():
                return
            if error is not None:
                lookup.answer.set_exception(error)
            else:
                lookup.answer.set_result(found)

        def work() -> None:
            found: list[str] = []
            failure: OSError | None = None
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except OSError as error:
                failure = error
            except Exception as error:  # a label that is too long, a zero byte in it, …
                failure = OSError(f"{host} cannot be looked up: {error}")
            if not loop.is_closed():
                try:
                    loop.call_soon_threadsafe(ended, found, failure)
                except RuntimeError:
                    return  # the loop was just closed

        try:
            threading.Thread(target=work, name="resolver", daemon=True).start()
        except RuntimeError as error:  # the machine has no thread left
            ended([], OSError(f"{host} cannot be looked up: {error}"))
        return lookup


def _seen(answer: asyncio.Future[list[str]]) -> None:
    """Mark the error of a lookup without waiters as retrieved."""
    if not answer.cancelled():
        answer.exception()
