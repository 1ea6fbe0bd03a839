"""Payloads and results that are too large for a row.

A row under 1 KB costs one unit a write, so larger texts go to an item of their own, and over 350 KB to a bucket if one
is set. The row keeps a reference: `item:KEY`, or that of the bucket.

A text expires by itself, so that none stays for ever after its row has expired. It lives at least as long as its row
can. It is written again, for another year, when its task is claimed, retried or found waiting (`agent/sweep`) with less
than half a year left, and when its task is put off or ends beyond that. Most tasks end before, and cost no such write.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final

from thunderagent.model.errors import PayloadTooLarge, StoreError, StoreUnavailable, TextGone, ThunderAgentError
from thunderagent.model.jsondata import is_same_json, sorted_json
from thunderagent.model.task import Task
from thunderagent.stores.engine import MAX_TEXT_BYTES, PAYLOAD_MARK, Blobs, Engine, KeptText

DAY_S: Final = 86400.0

KEEP_PAYLOAD_S: Final = 365 * DAY_S
"""Life of a payload after its due time, unless it is written again or purged before."""

LEFT_S: Final = 180 * DAY_S
"""Least life of a payload, from the due time, of a task that is claimed, put off or retried."""

SURE_S: Final = 100 * DAY_S
"""Least life of a payload while its task is open: it waits up to 70 days for the sweep."""

OBJECTS_AT_ONCE: Final = 8
OBJECTS_S: Final = 10.0
"""How long objects of a bucket are read for one call; those not begun by then count as unreadable."""


class LargeTexts:
    def __init__(self, engine: Engine, blobs: Blobs | None, *, refusal: StoreError | None = None) -> None:
        self._engine = engine
        self.blobs = blobs
        self._refusal = refusal

    def refusing(self, error: StoreError) -> LargeTexts:
        """The same texts, except that keeping one outside the row raises the error."""
        return LargeTexts(self._engine, self.blobs, refusal=error)

    def keep(self, key: str, text: str, *, what: str, expire_at: float) -> str | None:
        """Keep a text outside of the row when it is too large for it; the answer is the reference, None: inline.

        Raises:
            PayloadTooLarge: it is over 350 KB and there is no bucket for it; `what` names it.
            StoreError: it could not be written.
        """
        if self._fits(text):
            return None
        self.check(what, text)
        if self._refusal is not None:
            raise self._refusal
        if _size(text) > MAX_TEXT_BYTES and self.blobs:
            return self._put_object(self.blobs, key, text)
        self._engine.put_texts({key: text}, expire_at=expire_at)
        return f"item:{key}"

    def _put_object(self, blobs: Blobs, key: str, text: str) -> str:
        try:
            return blobs.put(key, text)
        except ThunderAgentError:
            raise
        except Exception as error:  # a bucket of another kind may raise anything
            raise StoreError(f"{key} could not be written: {error!r}") from error

    def check(self, what: str, text: str) -> None:
        """Check that a text can be kept; nothing is written.

        Raises:
            PayloadTooLarge: it is over 350 KB and there is no bucket for it; `what` names it.
        """
        size = _size(text)
        if size <= max(MAX_TEXT_BYTES, self._engine.inline_bytes) or self.blobs:
            return
        raise PayloadTooLarge(
            f"{what} has {size:,} bytes; at most {MAX_TEXT_BYTES:,} are kept in the table. Pass a reference to the "
            "data, or set THUNDERAGENT_BLOB_BUCKET to an S3 bucket for it"
        )

    def put_payload(self, task: Task) -> Task | ThunderAgentError:
        """The task with a large payload kept outside the row, or why it cannot be.

        The key has the digest of the payload: a refused duplicate overwrites nothing. Equal payloads have one key,
        whatever
        the order of their own keys.
        """
        if self._fits(task.payload_text):
            return task
        expire_at = max(task.created_at, task.submitted_at) + KEEP_PAYLOAD_S
        try:
            ref = self._keep_payload(task, expire_at=expire_at)
        except ThunderAgentError as error:
            return error
        return task if ref is None else replace(task, payload_text="", payload_ref=ref)

    def put_again(self, task: Task) -> ThunderAgentError | None:
        """Write a payload outside the row once more; the answer is why it cannot be."""
        stored = self.put_payload(task)
        return None if isinstance(stored, Task) else stored

    def _keep_payload(self, task: Task, *, expire_at: float) -> str | None:
        return self.keep(_key(task), task.payload_text, what=payload_of(task), expire_at=expire_at)

    def _fits(self, text: str) -> bool:
        return _size(text) <= self._engine.inline_bytes

    def inflate(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks with the texts that are outside their rows.

        A text that cannot be read concerns its task alone, as `payload_error` or `result_error`.
        """
        tasks = list(tasks)
        refs = dict.fromkeys(ref for task in tasks for ref in (task.payload_ref, task.result_ref) if ref)
        texts = self._read(refs) if refs else {}
        return [_with_texts(task, texts) for task in tasks]

    def outlive(self, task: Task, until: float, *, now: float) -> Task:
        """Make a payload outside the row live until then; the answer is the task.

        Costs one write of its size, nothing where it lives as long anyway.

        Raises:
            StoreUnavailable: it could not be written now.
        """
        if task.payload_ref is None:
            return task
        if not task.payload_text and task.payload_error is None:  # its row alone was read
            if until <= now + SURE_S:
                return task
            [task] = self.inflate([task])
        if task.payload_until is None or task.payload_until >= until:
            return task
        expire_at = max(until, now + KEEP_PAYLOAD_S)
        try:
            self._keep_payload(task, expire_at=expire_at)
        except StoreUnavailable:
            raise
        except ThunderAgentError:
            return task  # rejected for good: it keeps its end
        return replace(task, payload_until=expire_at)

    def outlive_all(self, tasks: Iterable[Task], *, now: float) -> list[Task]:
        """As `outlive`, for tasks as they are now; a payload that cannot be written now keeps its end."""
        living = []
        for task in tasks:
            until = task.expire_at if task.expire_at is not None else max(task.created_at, now) + LEFT_S
            with suppress(StoreUnavailable):
                task = self.outlive(task, until, now=now)
            living.append(task)
        return living

    def _read(self, refs: Iterable[str]) -> dict[str, KeptText | StoreError]:
        items = [ref for ref in refs if ref.startswith("item:")]
        return self._items(items) | self._objects([ref for ref in refs if not ref.startswith("item:")])

    def _items(self, refs: list[str]) -> dict[str, KeptText | StoreError]:
        if not refs:
            return {}
        try:
            found = self._engine.get_texts([ref.removeprefix("item:") for ref in refs])
        except StoreError as error:
            return dict.fromkeys(refs, error)
        return {ref: found.get(ref.removeprefix("item:"), _gone(ref)) for ref in refs}

    def _objects(self, refs: list[str]) -> dict[str, KeptText | StoreError]:
        """Texts in the bucket, some at a time, within `OBJECTS_S`."""
        until = time.monotonic() + OBJECTS_S

        def read(ref: str) -> KeptText | StoreError:
            if self.blobs is None:
                return StoreUnavailable(f"{ref} is needed: set THUNDERAGENT_BLOB_BUCKET as it was when it was stored")
            if time.monotonic() >= until:
                return StoreUnavailable(f"{ref} was not read: others took over {OBJECTS_S:g} s")
            try:
                return self.blobs.get(ref)
            except StoreError as error:
                return error
            except ThunderAgentError as error:
                return StoreError(str(error))
            except Exception as error:  # a bucket of another kind may raise anything
                return StoreError(f"{ref} could not be read: {error!r}")

        if len(refs) < 2:
            return {ref: read(ref) for ref in refs}
        with ThreadPoolExecutor(min(OBJECTS_AT_ONCE, len(refs)), thread_name_prefix="texts") as pool:
            return dict(zip(refs, pool.map(read, refs), strict=True))


def is_same_payload(existing: Task, task: Task) -> bool:
    """Whether the row of a task has the payload of another, or refers to it; nothing is read."""
    if existing.payload_ref is None or task.payload_ref is not None:
        return existing.payload_ref == task.payload_ref and is_same_json(existing.payload_text, task.payload_text)
    return existing.payload_ref.endswith(f"payload.{_digest(task.payload_text)}")


def payload_of(task: Task) -> str:
    """The payload of a task in messages."""
    return f"the payload of {task.job!r}"


def _key(task: Task) -> str:
    return f"{task.task_id}{PAYLOAD_MARK}{_digest(task.payload_text)}"


def _with_texts(task: Task, texts: Mapping[str, KeptText | StoreError]) -> Task:
    if task.payload_ref:
        found = texts[task.payload_ref]
        if isinstance(found, KeptText):
            task = replace(task, payload_text=found.text, payload_until=found.expire_at)
        else:
            task = replace(task, payload_error=found)
    if task.result_ref:
        found = texts[task.result_ref]
        if isinstance(found, KeptText):
            return replace(task, result_text=found.text)
        return replace(task, result_error=found)
    return task


def _gone(ref: str) -> TextGone:
    return TextGone(
        f"{ref} is gone: it was deleted, or its time to live is over. To bring a payload back, enqueue its task once "
        "more with the same task_id and payload, then retry it"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(sorted_json(text).encode()).hexdigest()[:16]


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
