"""The file in which an agent says how it is, for scripts that cannot reach the store: `<folder>/<pid>.json`.

It is written again each second. One that is old is that of an agent that was killed, or whose monitor has died.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thunderagent.agent.health.judgement import DEAD_S
from thunderagent.model.errors import ConfigurationError


class HealthFile:
    """The file of this process.

    Args:
        folder: made if it is not there.
        now: epoch seconds of the host's clock, by which the age of a file is told.

    Raises:
        ConfigurationError: nothing can be written there.
    """

    def __init__(self, folder: str, *, now: Callable[[], float]) -> None:
        self._folder = Path(folder)
        self._now = now
        self.path = self._folder / f"{os.getpid()}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._put("{}")
            self.path.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"THUNDERAGENT_HEALTH_FOLDER is {folder!r}, in which no file can be written: {error}"
            ) from error
        self._forget_the_dead()

    def write(self, facts: Mapping[str, Any], *, every_s: float) -> None:
        """Say how it is, in one piece: a reader sees the file before or after.

        Args:
            facts: JSON data.
            every_s: when the next is written.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        told = {**facts, "host": socket.gethostname(), "pid": os.getpid(), "time": self._now(), "every_s": every_s}
        self._put(json.dumps(told, indent=2, default=str) + "\n")

    def remove(self) -> None:
        """A good end leaves nothing."""
        with suppress(OSError):
            self.path.unlink()

    def _put(self, text: str) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.path)

    def _forget_the_dead(self) -> None:
        for path in self._folder.glob("*.json"):
            if _read(path).get("host") == socket.gethostname() and not _runs(path.stem):
                with suppress(OSError):  # we are the one that was started in its place
                    path.unlink()


def read_files(folder: str, *, now: float) -> list[dict[str, Any]]:
    """How the agents of a folder are. What is old or cannot be read is that of an agent which is not healthy.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if not Path(folder).is_dir():
        raise ConfigurationError(f"there is no folder {folder}: THUNDERAGENT_HEALTH_FOLDER of the agents names it")
    return [_judged(path, now) for path in sorted(Path(folder).glob("*.json"))]


def _judged(path: Path, now: float) -> dict[str, Any]:
    told = _read(path)
    try:
        age_s, every_s = now - float(told["time"]), float(told["every_s"])
        told = {"agent": str(told["agent"]), "healthy": bool(told["healthy"]), **told, "age_s": round(age_s, 1)}
    except (LookupError, TypeError, ValueError):
        return _dead({"agent": path.stem}, f"{path} is not the file of an agent: delete it")
    if age_s > DEAD_S * every_s:
        gone = "its process is gone" if not _runs(path.stem) else "its process runs, and does not get on"
        return _dead(told, f"{path} was not written for {age_s:.0f} s: {gone}")
    return told


def _dead(told: dict[str, Any], reason: str) -> dict[str, Any]:
    return {**told, "healthy": False, "alive": False, "state": "dead", "reasons": [reason]}


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:  # it runs, as another user
        return True
    return True
