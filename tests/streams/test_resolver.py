"""Names are looked up in time, once for all who ask at the same moment, and one does not hold up another."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.connections import now, run
from thunderagent.streams.connection.resolver import THREADS, Resolver


class Names:
    """A name server: it answers, fails, or hangs until it is let go."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.hanging: set[str] = set()
        self.errors: dict[str, Exception] = {}
        self.address = "192.0.2.1"
        self.let_go = threading.Event()

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked[host] += 1
        address = self.address
        if host in self.hanging:
            self.let_go.wait(10)
        if host in self.errors:
            raise self.errors[host]
        entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
        return [entry, entry, (*entry[:4], ("2001:db8::1", port, 0, 0))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    before = set(threading.enumerate())
    yield names
    names.let_go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "192.0.2.7"])
def test_an_address_needs_no_lookup(host: str, names: Names) -> None:
    async def main() -> None:
        assert await Resolver().addresses(host, 443, 1.0) == [host]
        assert not names.asked

    run(main())


def test_all_addresses_come_each_once(names: Names) -> None:
    async def main() -> None:
        assert await Resolver().addresses("peer.test", 443, 5.0) == ["192.0.2.1", "2001:db8::1"]

    run(main())


def test_many_who_ask_at_once_share_a_lookup(names: Names) -> None:
    async def main() -> None:
        names.hanging.add("peer.test")
        resolver = Resolver()
        asking = [asyncio.create_task(resolver.addresses("peer.test", 443, 5.0)) for _ in range(100)]
        await asyncio.sleep(0)
        asking[0].cancel()  # who goes away takes no answer from the others
        await asyncio.sleep(0)
        names.let_go.set()
        answers = await asyncio.gather(*asking[1:])
        assert len(answers) == 99
        assert all(answers)
        assert names.asked["peer.test"] == 1

    run(main())


def test_answers_are_not_kept_so_that_a_peer_that_moved_is_found(names: Names) -> None:
    async def main() -> None:
        resolver = Resolver()
        assert "192.0.2.1" in await resolver.addresses("peer.test", 443, 5.0)
        names.address = "192.0.2.2"
        assert "192.0.2.2" in await resolver.addresses("peer.test", 443, 5.0)

    run(main())


def test_a_lookup_is_given_up_in_time_and_the_next_one_asks_anew(names: Names) -> None:
    async def main() -> None:
        names.hanging.add("peer.test")
        resolver = Resolver()
        start = now()
        with pytest.raises(TimeoutError, match=r"the name peer.test was not resolved in 0.1 s"):
            await resolver.addresses("peer.test", 443, 0.1)
        assert 0.1 <= now() - start <= 0.6
        names.hanging.clear()
        assert await resolver.addresses("peer.test", 443, 0.05)
        assert names.asked["peer.test"] == 2

    run(main())


def test_a_hung_lookup_holds_up_no_other_name(names: Names) -> None:
    async def main() -> None:
        names.hanging.update(f"dead-{number}.test" for number in range(THREADS - 1))
        resolver = Resolver()
        hanging = [asyncio.create_task(resolver.addresses(name, 443, 9.0)) for name in names.hanging]
        await asyncio.sleep(0)
        start = now()
        assert await resolver.addresses("peer.test", 443, 5.0)
        assert now() - start <= 1.0
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)

    run(main())


def test_threads_are_limited_when_no_name_server_answers(names: Names) -> None:
    async def main() -> None:
        names.hanging.update(f"dead-{number}.test" for number in range(THREADS))
        resolver = Resolver()
        hanging = [asyncio.create_task(resolver.addresses(name, 443, 9.0)) for name in names.hanging]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match=f"{THREADS} lookups of other names have not ended"):
            await resolver.addresses("peer.test", 443, 5.0)
        names.let_go.set()
        await asyncio.gather(*hanging)
        assert await resolver.addresses("peer.test", 443, 5.0)

    run(main())


@pytest.mark.parametrize(
    "error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long"), OSError("no server"), ValueError("odd")]
)
def test_an_error_comes_as_one_of_the_network(error: Exception, names: Names) -> None:
    async def main() -> None:
        names.errors["peer.test"] = error
        resolver = Resolver()
        with pytest.raises(OSError):
            await resolver.addresses("peer.test", 443, 2.0)
        names.errors.clear()
        assert await resolver.addresses("peer.test", 443, 5.0)

    run(main())


def test_a_machine_without_threads_is_an_error_of_the_network(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        resolver = Resolver()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            for _ in range(THREADS + 1):
                with pytest.raises(OSError, match=r"peer.test cannot be looked up: can't start new thread"):
                    await resolver.addresses("peer.test", 443, 5.0)
        assert await resolver.addresses("peer.test", 443, 5.0)

    run(main())


def test_an_answer_that_comes_after_the_loop_has_ended_harms_nobody(names: Names) -> None:
    async def main() -> None:
        names.hanging.add("peer.test")
        with pytest.raises(TimeoutError):
            await Resolver().addresses("peer.test", 443, 0.05)

    run(main())
    names.let_go.set()
