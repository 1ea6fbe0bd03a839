"""Texts that are too large for a row: payloads and results over the engine's limit.

A row under 1 KB costs one unit a write, so larger texts go to an item of their own, and over 350 KB to a bucket if one
is set. The row keeps a reference: `item:KEY`, or what the bucket gave.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from thunderagent.errors import PayloadTooLarge, StoreError, StoreUnavailable, TextGone, ThunderAgentError
from thunderagent.port import MAX_TEXT_BYTES, Blobs, Engine
from thunderagent.task import Task

KEEP_PAYLOAD_S: Final = 365 * 86400.0
"""How long after its due time a payload that is kept apart is deleted, if nobody purged its task before."""

OBJECTS_AT_ONCE: Final = 8
OBJECTS_S: Final = 10.0
"""How long objects of a bucket are read for one call; those that were not begun by then could not be read."""


class Texts:
    """Keeps and reads large texts of one store."""

    def __init__(self, engine: Engine, blobs: Blobs | None) -> None:
        self._engine = engine
        self.blobs = blobs

    def keep(self, key: str, text: str, *, expire_at: float) -> str | None:
        """Keep a text outside of the row when it is too large for it; the answer is the reference, None: inline.

        Raises:
            PayloadTooLarge: it is over 350 KB and there is no bucket for it.
        """
        size = _size(text)
        if size <= self._engine.inline_bytes:
            return None
        self.check(key, text)
        if size > MAX_TEXT_BYTES and self.blobs:
            return self.blobs.put(key, text)
        self._engine.put_texts({key: text}, expire_at=expire_at)
        return f"item:{key}"

    def check(self, key: str, text: str) -> None:
        """Check that a text can be kept; nothing is written.

        Raises:
            PayloadTooLarge: it is over 350 KB and there is no bucket for it.
        """
        size = _size(text)
        if size <= max(MAX_TEXT_BYTES, self._engine.inline_bytes) or self.blobs:
            return
        raise PayloadTooLarge(
            f"{key} has {size:,} bytes; at most {MAX_TEXT_BYTES:,} are kept in the table. Pass a reference to the "
            "data, or set THUNDERAGENT_BLOB_BUCKET to an S3 bucket for it"
        )

    def put_payload(self, task: Task) -> Task | ThunderAgentError:
        """The task with a large payload kept apart, or why it cannot be.

        The key has the digest of the payload: a refused duplicate overwrites nothing.
        """
        expire_at = task.created_at + KEEP_PAYLOAD_S
        key = f"{task.task_id}#payload.{_digest(task.payload_text)}"
        try:
            ref = self.keep(key, task.payload_text, expire_at=expire_at)
        except ThunderAgentError as error:
            return error
        return task if ref is None else replace(task, payload_text="", payload_ref=ref)

    def inflate(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks with the texts that are kept outside of their rows.

        A text that cannot be read concerns its task alone: that has the reason as `payload_error` or `result_error`.
        """
        tasks = list(tasks)
        refs = {ref for task in tasks for ref in (task.payload_ref, task.result_ref) if ref}
        texts = self._read(refs) if refs else {}
        return [_with_texts(task, texts) for task in tasks]

    def _read(self, refs: Iterable[str]) -> dict[str, str | StoreError]:
        items = [ref for ref in refs if ref.startswith("item:")]
        return self._items(items) | self._objects([ref for ref in refs if not ref.startswith("item:")])

    def _items(self, refs: list[str]) -> dict[str, str | StoreError]:
        if not refs:
            return {}
        try:
            found = self._engine.get_texts([ref.removeprefix("item:") for ref in refs])
        except StoreError as error:
            return dict.fromkeys(refs, error)
        return {ref: found.get(ref.removeprefix("item:"), _gone(ref)) for ref in refs}

    def _objects(self, refs: list[str]) -> dict[str, str | StoreError]:
        """Texts in the bucket, some at a time: a bucket that does not answer holds nobody up for long."""
        until = time.monotonic() + OBJECTS_S

        def read(ref: str) -> str | StoreError:
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
            except Exception as error:  # a bucket that is not ours may raise anything
                return StoreError(f"{ref} could not be read: {error!r}")

        if len(refs) < 2:
            return {ref: read(ref) for ref in refs}
        with ThreadPoolExecutor(min(OBJECTS_AT_ONCE, len(refs)), thread_name_prefix="texts") as pool:
            return dict(zip(refs, pool.map(read, refs), strict=True))


def is_same_payload(existing: Task, task: Task) -> bool:
    """Whether the row of a task has the payload of another, or refers to it; nothing is read."""
    if existing.payload_ref is None or task.payload_ref is not None:
        return (existing.payload_ref, existing.payload_text) == (task.payload_ref, task.payload_text)
    return existing.payload_ref.endswith(f"payload.{_digest(task.payload_text)}")


def _with_texts(task: Task, texts: Mapping[str, str | StoreError]) -> Task:
    changes: dict[str, str | StoreError] = {}
    for name, ref in (("payload", task.payload_ref), ("result", task.result_ref)):
        if ref:
            text = texts[ref]
            changes[f"{name}_text" if isinstance(text, str) else f"{name}_error"] = text
    return replace(task, **changes) if changes else task  # type: ignore[arg-type] # each fits its field


def _gone(ref: str) -> TextGone:
    return TextGone(
        f"{ref} is gone: it was deleted, or its time to live is over. To bring a payload back, enqueue its task once "
        "more with the same task_id and payload, then retry it"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
