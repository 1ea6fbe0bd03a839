"""What one measured process counts, and how the process that measures reads it."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

RSS_EVERY: Final = 250
"""Tasks between two looks at the memory."""


@dataclass(slots=True)
class Tally:
    """Counts of one process; moments are monotonic seconds, which all processes of a machine share."""

    ran: int = 0
    ended: int = 0
    otherwise: int = 0
    """Tasks that ended in any other way than SUCCESS."""
    tried: int = 0
    won: int = 0
    first_started: float = 0.0
    last_ended: float = 0.0
    cpu_s: float = 0.0
    peak_kib: int = 0
    rss: list[tuple[int, int]] = field(default_factory=list)
    """Memory in KiB after so many tasks."""
    requests: int = 0
    refused: int = 0
    write_units: float = 0.0
    read_units: float = 0.0

    def started(self, now: float) -> None:
        """A task is about to run."""
        self.first_started = self.first_started or now
        self.ran += 1

    def succeeded(self, now: float, cpu_s: float) -> None:
        """A task is done."""
        self.ended += 1
        self.last_ended, self.cpu_s = now, cpu_s
        if self.ended % RSS_EVERY == 0:
            self.rss.append((self.ended, rss_kib()))

    def write(self, path: Path) -> None:
        """Leave the counts for `read`, whole or not at all."""
        self.peak_kib = peak_kib()
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Tally:
        """The counts that were left there last; none yet is nothing counted."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()

    @property
    def growth_kib(self) -> int | None:
        """Memory at the end less that after a quarter of the tasks; None when there were too few."""
        if len(self.rss) < 4:
            return None
        quarter = self.ended / 4
        early = next(size for count, size in self.rss if count >= quarter)
        return self.rss[-1][1] - early


def rss_kib() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except FileNotFoundError:
        return 0
    return pages * resource.getpagesize() // 1024


def peak_kib() -> int:
    """Most resident memory that this process had.

    Linux starts `ru_maxrss` with that of the process that called exec, so it is only asked where nothing else tells.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def total(tallies: Iterable[Tally]) -> Tally:
    """The counts of all processes together; the peak is that of the largest."""
    counted = list(tallies)
    both = Tally()
    for name in ("ran", "ended", "otherwise", "tried", "won", "cpu_s"):
        setattr(both, name, sum(getattr(one, name) for one in counted))
    for name in ("requests", "refused", "write_units", "read_units"):
        setattr(both, name, sum(getattr(one, name) for one in counted))
    both.first_started = min((one.first_started for one in counted if one.ran), default=0.0)
    both.last_ended = max((one.last_ended for one in counted), default=0.0)
    both.peak_kib = max((one.peak_kib for one in counted), default=0)
    return both
