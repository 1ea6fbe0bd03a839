"""The loop that everybody writes first, to compare with.

Ten oldest PENDING tasks by a query, claim one after the other in that order, run, write the end without a condition,
and no pause while there is work.

    python -m benchmarks.naive FOLDER NAME '{"store": "sqlite:////tmp/tasks.db"}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.naive_queues import Queue, open_queue
from benchmarks.processes import BenchFailed
from benchmarks.tally import Tally
from thunderagent.model.task import new_task_id

EMPTY: Final = 3
"""Empty queries in a row after which there is nothing left; the index may be late."""


def fill(url: str, single: int, bulk: int, deadline_s: float) -> tuple[float, float]:
    """Put tasks one by one and then many; seconds that each took."""
    tasks = open_queue(url, Tally())
    began = time.perf_counter()

    def ids(number: int) -> Iterator[str]:
        for _ in range(number):
            if time.perf_counter() - began > deadline_s:
                raise BenchFailed(f"the naive tasks could not be put in {deadline_s:g} s")
            yield new_task_id()

    for task_id in ids(single):
        tasks.put(task_id)
    between = time.perf_counter()
    tasks.put_many(ids(bulk))
    return between - began, time.perf_counter() - between


def drain(tasks: Queue, tally: Tally) -> Iterator[str]:
    """Run what is there until nothing is left; yields the id of each task that is run."""
    empty, cpu_s = 0, time.process_time()
    while empty < EMPTY:
        found = tasks.oldest()
        if not found:
            empty += 1
            time.sleep(0.05)
            continue
        empty = 0
        for task_id in found:
            tally.tried += 1
            if tasks.claim(task_id):
                tally.won += 1
                tally.started(time.monotonic())
                yield task_id
                tasks.finish(task_id)
                tally.succeeded(time.monotonic(), time.process_time() - cpu_s)


def main(folder: Path, name: str, store: str) -> None:
    """One process of the naive loop, from a line on standard input until nothing is left."""
    tally = Tally()
    tasks = open_queue(store, tally)
    tasks.oldest()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.readline():
        with (folder / f"{name}.runs").open("w", encoding="utf-8") as runs:
            runs.writelines(f"{task_id} 1 {time.monotonic()}\n" for task_id in drain(tasks, tally))
        tally.write(folder / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])["store"])
