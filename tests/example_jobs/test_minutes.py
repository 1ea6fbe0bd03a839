"""`MinuteFiles`: every line exactly once, wherever a run dies, whatever a late run does, and when the power fails."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jobs.files
import jobs.minutes
from jobs.minutes import MinuteFiles
from thunderagent import Cursor, StreamContext
from thunderagent.model.errors import LeaseLost
from thunderagent.testing import make_lease

ROOT: Final = Path(__file__).parents[2]
START: Final = datetime(2026, 7, 1, 10, 5, 59, tzinfo=UTC)
Tick = tuple[Cursor, datetime]

FEED: Final[list[Tick]] = [
    *((Cursor(seq, "a"), START + timedelta(seconds=seq / 2)) for seq in range(1, 7)),
    (Cursor(1, "b"), START + timedelta(seconds=3.5)),
    (Cursor(2, "b"), START - timedelta(seconds=1)),  # its clock goes back into an earlier minute
    (Cursor(3, "b"), START + timedelta(seconds=70)),
]
"""Ticks over three minutes and two epochs."""


def context(fence: int = 1, **task: Any) -> StreamContext:
    return StreamContext(make_lease("ticker.follow", fence=fence, submitted_at=100.0, **task))


def line(place: Cursor) -> str:
    return json.dumps(place.to_map())


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 20))


async def write(files: MinuteFiles, ticks: list[Tick]) -> None:
    for place, at in ticks:
        await files.append(line(place), place, at)


def behind(place: Cursor | None) -> list[Tick]:
    """What the feed sends to whom asks for what comes behind a place."""
    return FEED if place is None else FEED[[one for one, _ in FEED].index(place) + 1 :]


def contents(folder: Path) -> dict[str, list[Cursor]]:
    """The places in each file."""
    return {
        path.name: [Cursor(**json.loads(text)) for text in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }


def expected(ticks: list[Tick]) -> dict[str, list[Cursor]]:
    """The files that hold these ticks, each in its minute and in their order."""
    files: dict[str, list[Cursor]] = {}
    for place, at in ticks:
        files.setdefault(f"{at:%Y-%m-%dT%H-%M}.jsonl", []).append(place)
    return files


# One run after the other


def test_a_line_goes_into_the_file_of_its_own_minute_in_utc(tmp_path: Path) -> None:
    async def main() -> None:
        async with MinuteFiles(tmp_path, context()) as files:
            east = timezone(timedelta(hours=5, minutes=30))
            times = [
                datetime(2026, 7, 1, 10, 5, 59, 999_999, tzinfo=UTC),
                datetime(2026, 7, 1, 10, 6, tzinfo=UTC),
                datetime(2026, 7, 1, 10, 6, 59, tzinfo=UTC).astimezone(east),
                datetime(2027, 1, 1, 0, 0, tzinfo=UTC),
            ]
            await write(files, [(Cursor(seq, "a"), at) for seq, at in enumerate(times, start=1)])

    run(main())
    assert {name: [one.seq for one in places] for name, places in contents(tmp_path).items()} == {
        "2026-07-01T10-05.jsonl": [1],
        "2026-07-01T10-06.jsonl": [2, 3],
        "2027-01-01T00-00.jsonl": [4],
    }


def test_the_files_tell_how_far_they_are_though_the_epoch_changes_and_the_time_goes_back(tmp_path: Path) -> None:
    async def main() -> None:
        for number, (place, at) in enumerate(FEED):
            async with MinuteFiles(tmp_path, context(number + 1)) as files:
                assert files.place == (FEED[number - 1][0] if number else None)
                await files.append(line(place), place, at)
                assert files.place == place

    run(main())
    assert contents(tmp_path) == expected(FEED)


def test_a_torn_last_line_is_cut_off_and_written_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with MinuteFiles(tmp_path, context(1)) as files:
            await write(files, FEED[:3])
        with (tmp_path / "2026-07-01T10-06.jsonl").open("a") as file:
            file.write(line(FEED[3][0])[:-2])
        async with MinuteFiles(tmp_path, context(2)) as files:
            assert files.place == FEED[2][0]
            await write(files, behind(files.place))

    run(main())
    assert contents(tmp_path) == expected(FEED)


def test_a_write_that_takes_only_a_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Dying):
        def write(self, descriptor: int, data: bytes) -> int:
            return os.write(descriptor, data[:3])

    async def main() -> None:
        async with MinuteFiles(tmp_path, context()) as files:
            monkeypatch.setattr("jobs.minutes.os", Slow(None))
            await write(files, FEED)

    run(main())
    assert contents(tmp_path) == expected(FEED)


# Wherever it ends


class Died(BaseException):
    """The process is gone."""


class Dying:
    """The module `os` for one run: it dies at a call, which may be done in part, and does nothing from then on."""

    CALLS: Final = ("open", "close", "write", "fsync", "fdatasync", "truncate", "fstat")

    def __init__(self, at: int | None, disk: Disk | None = None) -> None:
        self.at = at
        self.calls = 0
        self._disk = disk
        self._open: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (lambda *given: self._call(name, real, *given)) if name in self.CALLS else real

    def _call(self, name: str, real: Callable[..., Any], *given: Any) -> Any:
        self.calls += 1
        if self.at is not None and self.calls >= self.at:
            if name == "write" and self.calls == self.at:
                real(given[0], given[1][: len(given[1]) // 2])
            raise Died
        if name in ("fsync", "fdatasync"):  # no real one: there are hundreds, and each would wait for the real disk
            return self._disk.synced(given[0]) if self._disk else None
        result = real(*given)
        if name == "open":
            self._open.add(result)
        if name == "close":
            self._open.discard(given[0])
        return result

    def bury(self) -> None:
        """Close what the dead process had open, as the system does."""
        for descriptor in self._open:
            os.close(descriptor)


class Disk:
    """What survives a power failure: of each file and folder what it held when it was last synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, int] = {}
        self._kept: dict[int, bytes] = {}
        self._pins: list[int] = []

    def synced(self, descriptor: int) -> None:
        self._pins.append(os.dup(descriptor))  # so that no other file gets the number of this one
        path = Path(f"/proc/self/fd/{descriptor}")
        if path.is_dir():
            self._entries = {one.name: one.stat().st_ino for one in self._folder.iterdir()}
        else:
            self._kept[os.fstat(descriptor).st_ino] = path.read_bytes()

    def fail(self) -> None:
        """The power fails, and comes back."""
        survives = {name: self._kept.get(number, b"") for name, number in self._entries.items()}
        for one in self._folder.iterdir():
            one.unlink()
        for name, content in survives.items():
            (self._folder / name).write_bytes(content)
            descriptor = os.open(self._folder / name, os.O_RDONLY)
            self.synced(descriptor)
            os.close(descriptor)
        self._entries = {name: (self._folder / name).stat().st_ino for name in survives}

    def close(self) -> None:
        for pin in self._pins:
            os.close(pin)


async def life(folder: Path, fence: int, cursors: list[Cursor]) -> None:
    """A run as the ticker does it: it goes on where the files or the cursor are, and saves before each checkpoint."""
    async with MinuteFiles(folder, context(fence)) as files:
        last = [files.place, cursors[-1] if cursors else None]
        places = [place for place, _ in FEED]
        place = max(last, key=lambda one: places.index(one) if one else -1)
        for number, tick in enumerate(behind(place)):
            await write(files, [tick])
            if number % 2:
                await files.save()
                cursors.append(tick[0])


@contextmanager
def system(dying: Dying) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.minutes, "os", dying)
        patch.setattr(jobs.files, "os", dying)
        try:
            yield
        finally:
            dying.bury()


def lives(folder: Path, deaths: tuple[int, ...], *, power: bool) -> int:
    """Runs that end at these calls, then one that comes to its end; returns how many calls that one made."""
    disk = Disk(folder) if power else None
    cursors: list[Cursor] = []
    try:
        for fence, at in enumerate(deaths, start=1):
            with system(Dying(at, disk)), pytest.raises(Died):
                run(life(folder, fence, cursors))
            if disk:
                disk.fail()
        last = Dying(None, disk)
        with system(last):
            run(life(folder, len(deaths) + 1, cursors))
    finally:
        if disk:
            disk.close()
    return last.calls


@pytest.mark.slow
@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_wherever_a_run_dies_every_line_is_there_once(tmp_path: Path, power: bool) -> None:
    folder = tmp_path / "whole"
    folder.mkdir()
    calls = lives(folder, (), power=power)
    assert contents(folder) == expected(FEED)
    assert calls > 30
    for at in range(1, calls - 2):
        folder = tmp_path / str(at)
        folder.mkdir()
        lives(folder, (at,), power=power)
        assert contents(folder) == expected(FEED), f"it died at call {at}"


@pytest.mark.slow
@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_a_run_that_dies_while_it_mends_what_another_left_loses_nothing(tmp_path: Path, power: bool) -> None:
    for number, deaths in enumerate(itertools.product((17, 24, 40), range(2, 16, 3), (3, 9))):
        folder = tmp_path / str(number)
        folder.mkdir()
        lives(folder, deaths, power=power)
        assert contents(folder) == expected(FEED), f"they died at calls {deaths}"


WRITER: Final = """
import asyncio, itertools, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from jobs.minutes import MinuteFiles
from thunderagent import Cursor, StreamContext
from thunderagent.testing import make_lease

async def main():
    ctx = StreamContext(make_lease("ticker.follow", fence=int(sys.argv[2]), submitted_at=100.0))
    async with MinuteFiles(Path(sys.argv[1]), ctx) as files:
        for seq in itertools.count(files.place.seq + 1 if files.place else 1):
            at = datetime(2026, 7, 1, tzinfo=UTC) + timedelta(seconds=seq / 10)
            await files.append('{"epoch":"a","seq":%d}' % seq, Cursor(seq, "a"), at)

asyncio.run(main())
"""


@pytest.mark.processes
def test_kill_9_among_appends_loses_and_repeats_nothing(tmp_path: Path) -> None:
    folder, enough = tmp_path / "ticks", 0
    for fence in range(1, 5):
        enough += 1500  # two changes of the minute and more
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(fence)], cwd=ROOT)
        try:
            until = time.monotonic() + 30
            while sum(path.stat().st_size for path in folder.glob("*.jsonl")) < enough * 22:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.003)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()

    async def mend() -> None:
        async with MinuteFiles(folder, context(5)):
            pass

    run(mend())
    places = [one.seq for file in contents(folder).values() for one in file]
    assert places == list(range(1, len(places) + 1))
    assert len(places) > 4000


# Late runs


@pytest.mark.slow
def test_a_former_run_that_wakes_up_late_can_append_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        for number in range(1, len(FEED)):
            folder = tmp_path / str(number)
            async with MinuteFiles(folder, context(1)) as late:
                await write(late, FEED[:number])
                async with MinuteFiles(folder, context(2)) as new:
                    with pytest.raises(LeaseLost, match="newer run"):
                        await write(late, behind(late.place))
                    await write(new, behind(new.place))
                with pytest.raises(LeaseLost):
                    await write(late, behind(late.place))
                await late.save()
            assert contents(folder) == expected(FEED)

    run(main())


def test_a_former_run_that_begins_late_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with MinuteFiles(tmp_path, context(7)) as new:
            with pytest.raises(LeaseLost):
                await MinuteFiles(tmp_path, context(6)).__aenter__()
            await write(new, FEED)

    run(main())
    assert contents(tmp_path) == expected(FEED)


def test_a_task_that_was_deleted_and_enqueued_again_goes_on_though_its_fence_starts_afresh(tmp_path: Path) -> None:
    async def main() -> None:
        async with MinuteFiles(tmp_path, context(9)) as old:
            await write(old, FEED[:4])
        lease = make_lease("ticker.follow", fence=1, submitted_at=200.0)
        async with MinuteFiles(tmp_path, StreamContext(lease)) as new:
            await write(new, behind(new.place))

    run(main())
    assert contents(tmp_path) == expected(FEED)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "append", "append", "tear"]), st.integers(0, 3)), max_size=30))
def test_however_runs_interleave_only_the_newest_writes(actions: list[tuple[str, int]]) -> None:
    async def main(folder: Path) -> None:
        runs: list[MinuteFiles] = []
        for action, which in actions:
            if action == "begin":
                runs.append(await MinuteFiles(folder, context(len(runs) + 1)).__aenter__())
            elif action == "append" and runs:
                files = runs[-1 - which % len(runs)]
                tick = behind(files.place)[:1]
                if files is runs[-1]:
                    await write(files, tick)
                elif tick:
                    with pytest.raises(LeaseLost):
                        await write(files, tick)
            elif action == "tear" and runs and runs[-1].place is not None:
                # The newest run dies in the middle of a line; another one takes its place.
                with (folder / str(runs[-1]._name)).open("a") as file:
                    file.write('{"seq": 9')
                runs.append(await MinuteFiles(folder, context(len(runs) + 1)).__aenter__())
        if runs:
            await write(runs[-1], behind(runs[-1].place))
            assert contents(folder) == expected(FEED)
        for files in runs:
            await files.__aexit__()

    with tempfile.TemporaryDirectory() as folder:
        run(main(Path(folder)))


# The lock


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Another process that has been stopped while it had the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_lock_that_is_never_released_is_told_and_holds_up_no_other_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.minutes, "LOCK_S", 0.1)

    async def main() -> None:
        async with MinuteFiles(tmp_path, context()) as files:
            with locked(tmp_path):
                appending = asyncio.create_task(write(files, FEED[:1]))
                turns = 0
                while not appending.done():
                    await asyncio.sleep(0.005)
                    turns += 1
                assert turns > 5
                with pytest.raises(TimeoutError, match="a process that wrote here has been stopped; end it"):
                    await appending

    run(main())
    assert contents(tmp_path) == {}


def test_a_run_waits_for_the_lock_and_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with MinuteFiles(tmp_path, context()) as files:
            with locked(tmp_path):
                appending = asyncio.create_task(write(files, FEED))
                await asyncio.sleep(0)
                assert not appending.done()
            await appending

    run(main())
    assert contents(tmp_path) == expected(FEED)
