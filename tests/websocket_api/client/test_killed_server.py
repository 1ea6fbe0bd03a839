"""A server that is killed with SIGKILL, and started again: the client brings what it has."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.websocket_api.client.support import PROMPT, connected, run, until
from thunderagent.streams.connection.endpoint import Attempt

START_S = 30.0


def free_ports() -> int:
    """The first of two loopback ports next to each other that nobody has."""
    for _ in range(50):
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two free ports")


@contextmanager
def served(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`thunderagent wsapi serve --demo` with one region; it listens."""
    command = [sys.executable, "-m", "thunderagent", "wsapi", "serve", "--demo", "--region", "here"]
    with subprocess.Popen(
        [*command, "--port", str(port), "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            while "token" not in (line := process.stdout.readline()):
                assert line, "it ended"
            yield process
        finally:
            process.kill()


@pytest.mark.processes
def test_a_change_that_a_killed_server_may_or_may_not_have_is_made_once(tmp_path: Path) -> None:
    port = free_ports()

    def token(attempt: Attempt) -> str:
        with urlopen(f"http://127.0.0.1:{port}/token?user=ada", timeout=5.0) as answer:
            return str(json.load(answer)["token"])

    async def main() -> None:
        with served(tmp_path, port) as process:
            async with connected(f"ws://127.0.0.1:{port}/", token=token, ready_s=15.0, options=PROMPT) as client:
                answers = [client.submit({f"n{number}": number}) for number in range(60)]
                await answers[10]
                process.send_signal(signal.SIGKILL)  # in the middle of a change
                await until(lambda: not client.is_connected)
                assert client.unacknowledged
                with served(tmp_path, port):
                    versions = await asyncio.wait_for(asyncio.gather(*answers), START_S)
                    assert versions == list(range(1, 61))
                    assert await client.get() == {f"n{number}": number for number in range(60)}
                    assert client.version == 60

    run(main(), limit_s=60.0)
