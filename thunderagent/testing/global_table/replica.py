"""The items of one region of a simulated global table, and the images of items that go to other regions.

DynamoDB's rule: the replica that a write reaches judges and answers it. The whole item goes to the other regions
afterwards, each item on its own. Where two regions have written one item, the later write stays and the other is lost
silently. A write that builds on one of another region counts as later, however their clocks are set, so that all
replicas come to the same end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Row
from thunderagent.stores.engine import Applied, Engine

TOMBSTONES_KEPT: Final = 10_000
"""Deleted items that are remembered until no image is on its way."""


class Version(NamedTuple):
    """The moment of a write; of two writes the larger stays."""

    at: float
    step: int
    """Number among writes at one moment that build on each other."""
    region: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """The last write of an item."""

    version: Version
    seen: Mapping[str, int]
    """Writes of each region on which this one builds, itself included."""

    def builds_on(self, other: Stamp) -> bool:
        """True when this write saw the other, directly or through others."""
        return all(self.seen.get(region, 0) >= number for region, number in other.seen.items())


@dataclass(frozen=True, slots=True)
class Image:
    """An item after a write: a row, a large text with its expiry, or nothing."""

    item_id: str
    stamp: Stamp
    row: Row | None = None
    text: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A write that was answered as done and is lost: another region wrote the item later without having seen it."""

    item_id: str
    region: str
    """Of the lost write."""
    by: str
    """Region of the write that stays."""
    row: Row | None
    """The lost row; None: it was deleted, or is a large text."""


class Replica:
    """One region's items. A writer holds `guard` from before its write until the write is noted."""

    def __init__(self, region: str, engine: Engine) -> None:
        self.region = region
        self.engine = engine
        self.guard = threading.RLock()
        self._stamps: dict[str, Stamp] = {}
        self._gone: set[str] = set()
        self._texts: set[str] = set()
        self._doubts: set[str] = set()

    def note(self, item_id: str, row: Row | None, *, at: float, text: tuple[str, float] | None = None) -> Image:
        """The image of an item that was just written here.

        Args:
            row: after the write; None: it is deleted, or is a text.
            at: time of the write on the clock of the region.
        """
        known = self._stamps.get(item_id)
        version, seen = Version(at, 0, self.region), dict(known.seen if known else {})
        if known is not None and at <= known.version.at:
            version = Version(known.version.at, known.version.step + 1, self.region)
        seen[self.region] = seen.get(self.region, 0) + 1
        image = Image(item_id, Stamp(version, seen), None if row is None else dict(row), text)
        self._remember(image)
        return image

    def doubt(self, item_ids: Iterable[str]) -> None:
        """Note items whose writes had no answer."""
        self._doubts.update(item_ids)

    def resolve(self, at: float) -> list[Image]:
        """Images of the items whose writes had no answer."""
        with self.guard:
            if not self._doubts:
                return []
            rows = self.engine.get(sorted(self._doubts))
            images = [self.note(item_id, rows.get(item_id), at=at) for item_id in sorted(self._doubts)]
            self._doubts.clear()
            return images

    def vanished(self) -> list[str]:
        living = [item_id for item_id in self._stamps if item_id not in self._gone and item_id not in self._texts]
        left = self.engine.get(living)
        return [item_id for item_id in living if item_id not in left]

    def receive(self, image: Image) -> Overwritten | None:
        """Take an image of another region if it is later than the item here.

        Returns:
            the write of this or a third region that is lost by that, unseen by the one that stays.

        Raises:
            StoreError: the engine did not take it; the image may be received again.
        """
        with self.guard:
            known = self._stamps.get(image.item_id)
            if known is not None and image.stamp.version <= known.version:
                return None
            before = self._take(image)
            self._remember(image)
            if known is None or image.stamp.builds_on(known):
                return None
            return Overwritten(image.item_id, known.version.region, image.stamp.version.region, before)

    @property
    def tombstones(self) -> int:
        return len(self._gone)

    def forget_tombstones(self) -> None:
        """Forget deleted items, as no image is on its way."""
        for item_id in self._gone:
            del self._stamps[item_id]
            self._texts.discard(item_id)
        self._gone.clear()

    def _remember(self, image: Image) -> None:
        self._stamps[image.item_id] = image.stamp
        if image.text is not None:
            self._texts.add(image.item_id)
        if image.row is None and image.text is None:
            self._gone.add(image.item_id)
        else:
            self._gone.discard(image.item_id)

    def _take(self, image: Image) -> Row | None:
        """Make the item equal to the image; the answer is the row before."""
        if image.text is not None:
            text, expire_at = image.text
            self.engine.put_texts({image.item_id: text}, expire_at=expire_at)
            return None
        before = self.engine.get([image.item_id]).get(image.item_id)
        if image.row is None:
            self._delete(before)
        elif before is None:
            self._done(self.engine.put([image.row]), image.item_id)
        elif (write := _difference(before, image.row)) is not None:
            self._done(self.engine.apply([write]), image.item_id)
        return before

    def _delete(self, row: Row | None) -> None:
        if row is None:
            return
        if "status" in row and "fence" in row:  # with its large texts
            self.engine.delete([row])
        else:
            gone = Write(verb="replicate", task_id=row["taskId"], delete=True, require=(Present("taskId"),))
            self._done(self.engine.apply([gone]), row["taskId"])

    def _done(self, answers: list[Applied], item_id: str) -> None:
        for answer in answers:
            if answer.error:
                raise answer.error
            if not answer.won:
                raise StoreError(
                    f"{item_id} of the region {self.region!r} was changed past the simulation while it was replicated: "
                    "write only through GlobalTableSim.engine(region)"
                )


def _difference(before: Row, then: Row) -> Write | None:
    """The write that makes one row the other; None: they are equal."""
    changes = {name: value for name, value in then.items() if value is not None and before.get(name) != value}
    removed = tuple(name for name in before if then.get(name) is None)
    if not changes and not removed:
        return None
    return Write(verb="replicate", task_id=before["taskId"], set=changes, remove=removed, require=(Present("taskId"),))
