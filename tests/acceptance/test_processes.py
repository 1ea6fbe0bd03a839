"""What the tests believe of processes is true."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.acceptance.processes import LONG_S, stands_still, until

pytestmark = pytest.mark.processes

BUSY = """
import os, struct, sys, threading
moments, other = open(sys.argv[1], "r+b", buffering=0), open(sys.argv[2], "wb", buffering=0)

def count():
    number = 0
    while True:
        number += 1
        os.pwrite(moments.fileno(), struct.pack("Q", number), 0)

threading.Thread(target=count, daemon=True).start()
while True:
    os.pwrite(other.fileno(), b"x" * 2_000_000, 0)
    os.fsync(other.fileno())
"""
"""Its first thread is the one that gets the signal, and mostly waits for the disk: the other goes on meanwhile."""


def test_a_process_that_stands_still_does_nothing_any_more(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))

    def count() -> int:
        (number,) = struct.unpack("Q", counter.read_bytes())
        return int(number)

    process = subprocess.Popen([sys.executable, "-c", BUSY, str(counter), str(tmp_path / "other")])
    try:
        for _ in range(30):
            before = count()
            until(lambda before=before: count() > before, LONG_S, "it counts")  # type: ignore[misc]
            assert not stands_still(process.pid)
            process.send_signal(signal.SIGSTOP)
            until(lambda: stands_still(process.pid), LONG_S, "a process that has stopped")
            stopped = count()
            time.sleep(0.01)  # it would go on now if it could
            assert count() == stopped
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait(LONG_S)
    assert stands_still(process.pid), "one that is gone does nothing either"
