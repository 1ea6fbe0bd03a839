"""The health file of an agent, for scripts that cannot reach the store: `<folder>/<pid>.json`.

It is written again each second. An old file is that of an agent that was killed, or whose monitor has died.
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
        now: epoch seconds of the host's clock.

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
        self._remove_stale()

    def write(self, facts: Mapping[str, Any], *, every_s: float) -> None:
        """Replace the file in one step: a reader sees the old one or the new one.

        Args:
            facts: JSON data.
            every_s: seconds until the next write.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        content = {**facts, "host": socket.gethostname(), "pid": os.getpid(), "time": self._now(), "every_s": every_s}
        self._put(json.dumps(content, indent=2, default=str) + "\n")

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()

    def _put(self, text: str) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.path)

    def _remove_stale(self) -> None:
        for path in self._folder.glob("*.json"):
            if _read(path).get("host") == socket.gethostname() and not _runs(path.stem):
                with suppress(OSError):  # another agent may have removed it
                    path.unlink()


def read_files(folder: str, *, now: float) -> list[dict[str, Any]]:
    """The health of the agents of a folder. A file that is old or cannot be read means an agent that is not healthy.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if not Path(folder).is_dir():
        raise ConfigurationError(f"there is no folder {folder}: THUNDERAGENT_HEALTH_FOLDER of the agents names it")
    return [_judged(path, now) for path in sorted(Path(folder).glob("*.json"))]


def _judged(path: Path, now: float) -> dict[str, Any]:
    facts = _read(path)
    try:
        age_s, every_s = now - float(facts["time"]), float(facts["every_s"])
        facts = {"agent": str(facts["agent"]), "healthy": bool(facts["healthy"]), **facts, "age_s": round(age_s, 1)}
    except (LookupError, TypeError, ValueError):
        return _dead({"agent": path.stem}, f"{path} is not the file of an agent: delete it")
    if age_s > DEAD_S * every_s:
        gone = "its process is gone" if not _runs(path.stem) else "its process runs, and does not get on"
        return _dead(facts, f"{path} was not written for {age_s:.0f} s: {gone}")
    return facts


def _dead(facts: dict[str, Any], reason: str) -> dict[str, Any]:
    return {**facts, "healthy": False, "alive": False, "state": "dead", "reasons": [reason]}


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:  # it runs, as another user
        return True
    return True
