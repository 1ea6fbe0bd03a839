"""Stores to measure on: a fresh one for each measurement, and the engines that are started for them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchFailed
from thunderagent.model.task import DEFAULT_QUEUE
from thunderagent.ops import local_engine as local
from thunderagent.stores import open_engine
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table

HOST: Final = "127.0.0.1"
START_S: Final = 30.0


@dataclass(slots=True)
class Place:
    """Where measurements happen."""

    name: str
    folder: Path
    endpoint: str = ""
    given: str = ""
    """A store that is not ours: tasks go there in a queue of their own."""
    queue: str = DEFAULT_QUEUE
    naive: bool = True
    _made: int = field(default=0, init=False)

    def fresh(self) -> str:
        """URL of an empty store."""
        self._made += 1
        if self.given:
            return self.given
        if not self.endpoint:
            return f"sqlite:///{self.folder}/tasks-{self._made}.db"
        url = f"dynamodb://Bench{self._made}?region=us-east-1&endpoint={self.endpoint}"
        engine = open_engine(url)
        assert isinstance(engine, DynamoEngine)
        create_table(engine, wait_s=START_S, sleep=lambda _: time.sleep(0.05))
        engine.close()
        return url


@contextmanager
def opened(store: str, folder: Path, dynalite_folder: Path | None) -> Iterator[Place]:
    """The place that `--store` names; an engine that is started for it is stopped at the end of the block."""
    if store == "sqlite":
        yield Place(store, folder)
    elif store == "ministack":
        home = folder / "ministack"
        try:
            yield Place(store, folder, local.start(home).endpoint)
        finally:
            local.stop(home)
    elif store == "dynalite":
        with dynalite(dynalite_folder, folder) as endpoint:
            yield Place(store, folder, endpoint)
    elif "://" in store:
        yield Place(store, folder, given=store, queue=f"bench-{uuid.uuid4().hex[:8]}", naive=False)
    else:
        raise BenchFailed(f"--store {store}: use sqlite, ministack, dynalite or the URL of a store")


@contextmanager
def dynalite(folder: Path | None, home: Path) -> Iterator[str]:
    """A dynalite process on a free port of the loopback address; yields its endpoint."""
    node, program = shutil.which("node"), _dynalite_program(folder)
    if node is None:
        raise BenchFailed("dynalite needs node, which is not here; use --store ministack, or install Node.js")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    times = [f"--{name}TableMs=0" for name in ("create", "delete", "update")]
    with (home / "dynalite.log").open("wb") as log:
        process = subprocess.Popen(
            [node, str(program), "--host", HOST, "--port", str(port), *times],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _await_port(port, process)
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait()


def _dynalite_program(folder: Path | None) -> Path:
    root = Path(__file__).resolve().parents[2]
    for base in (folder, root, Path.cwd()):
        if base is None:
            continue
        for program in (base / "cli.js", base / "dynalite" / "cli.js", base / "node_modules" / "dynalite" / "cli.js"):
            if program.is_file():
                return program
        if base == folder:
            break
    raise BenchFailed(
        f"there is no dynalite in {folder or root}; install it with: npm install --prefix FOLDER dynalite, "
        "and name it with --dynalite FOLDER"
    )


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.05)
    raise BenchFailed(f"dynalite did not start within {START_S:g} s")
