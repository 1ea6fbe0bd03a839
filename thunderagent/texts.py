"""Texts that are too large for a row: payloads and results over the engine's limit.

A row under 1 KB costs one unit a write, so larger texts go to an item of their own, and over 350 KB to a bucket if one
is set. The row keeps a reference: `item:KEY`, or what the bucket gave.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

from thunderagent.errors import AccessDenied, PayloadTooLarge, StoreError, StoreUnavailable
from thunderagent.port import MAX_TEXT_BYTES, Blobs, Engine
from thunderagent.task import Task

KEEP_PAYLOAD_S: Final = 365 * 86400.0
"""How long after its due time a payload that is kept apart is deleted, if nobody purged its task before."""


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

    def put_payload(self, task: Task) -> Task | PayloadTooLarge:
        """The task with a large payload kept apart. The key has its digest: a refused duplicate overwrites nothing."""
        digest = hashlib.sha256(task.payload_text.encode()).hexdigest()[:16]
        expire_at = task.created_at + KEEP_PAYLOAD_S
        try:
            ref = self.keep(f"{task.task_id}#payload.{digest}", task.payload_text, expire_at=expire_at)
        except PayloadTooLarge as error:
            return error
        return task if ref is None else replace(task, payload_text="", payload_ref=ref)

    def inflate(self, tasks: list[Task]) -> list[Task]:
        """The tasks with the texts that are kept outside of their rows.

        Raises:
            StoreError: a text could not be read now.
        """
        refs = {ref for task in tasks for ref in (task.payload_ref, task.result_ref) if ref}
        if not refs:
            return tasks
        keys = [ref.removeprefix("item:") for ref in refs if ref.startswith("item:")]
        texts = {f"item:{key}": text for key, text in self._engine.get_texts(keys).items()} if keys else {}
        for ref in refs - texts.keys():
            if not ref.startswith("item:"):
                texts[ref] = self._blob(ref)
        return [
            replace(
                task,
                payload_text=texts.get(task.payload_ref, "") if task.payload_ref else task.payload_text,
                result_text=texts.get(task.result_ref) if task.result_ref else task.result_text,
            )
            for task in tasks
        ]

    def _blob(self, ref: str) -> str:
        """A text in the bucket. One that is gone for good is empty, so that its task fails and blocks nobody."""
        if self.blobs is None:
            raise StoreUnavailable(f"{ref} is needed: set THUNDERAGENT_BLOB_BUCKET as it was when it was stored")
        try:
            return self.blobs.get(ref)
        except (StoreUnavailable, AccessDenied):
            raise
        except StoreError:
            return ""


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
