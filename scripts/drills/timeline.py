"""What happened when: told as it happens, and as a table at the end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drills.pace import Pace


@dataclass(frozen=True, slots=True)
class Mark:
    """Something happened."""

    name: str
    at: float
    """Monotonic seconds."""
    text: str


class Timeline:
    """Marks of one act, in seconds of the story since its begin."""

    def __init__(self, title: str, pace: Pace, console: Console) -> None:
        self.title = title
        self._pace = pace
        self._console = console
        self._guard = threading.Lock()
        self.begun = time.monotonic()
        self._marks: dict[str, Mark] = {}

    def begin(self) -> None:
        """It begins now."""
        self.begun = time.monotonic()
        self._console.print(f"\n[bold]{escape(self.title)}[/bold]")

    def mark(self, name: str, text: str, at: float | None = None) -> None:
        """Something happened, now or at a moment; what has happened before does not happen again."""
        moment = time.monotonic() if at is None else at
        with self._guard:
            if name in self._marks:
                return
            self._marks[name] = Mark(name, moment, text)
            self._console.print(f"{self._told(moment):>9}  {escape(text)}")

    def has(self, name: str) -> bool:
        """Whether it has happened."""
        with self._guard:
            return name in self._marks

    def since(self, name: str) -> float | None:
        """Real seconds from the begin to a mark; None: it did not happen."""
        with self._guard:
            mark = self._marks.get(name)
        return None if mark is None else mark.at - self.begun

    def table(self) -> Table:
        """All marks in their order."""
        shown = Table(title=self.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        shown.add_column("story", justify="right")
        shown.add_column("here", justify="right")
        shown.add_column("")
        for mark in self._sorted():
            shown.add_row(self._told(mark.at), f"{mark.at - self.begun:.2f} s", escape(mark.text))
        return shown

    def as_json(self) -> list[dict[str, object]]:
        """The same for programs."""
        return [
            {
                "name": mark.name,
                "text": mark.text,
                "real_s": round(mark.at - self.begun, 3),
                "story_s": round(self._pace.told(mark.at - self.begun), 1),
            }
            for mark in self._sorted()
        ]

    def _sorted(self) -> list[Mark]:
        with self._guard:
            return sorted(self._marks.values(), key=lambda mark: mark.at)

    def _told(self, moment: float) -> str:
        seconds = self._pace.told(moment - self.begun)
        sign, whole = ("-" if seconds < 0 else ""), abs(seconds)
        return f"{sign}{int(whole // 60)}:{whole % 60:04.1f}"
