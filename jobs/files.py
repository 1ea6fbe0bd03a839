"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from pathlib import Path


def write_atomically(path: Path, text: str) -> Path:
    """Write a file so that a reader, a crash or a second run at the same time never sees a part of it.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, as an agent that lost its lease may still be writing the same file.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return path


def file_name(task_id: str, suffix: str) -> str:
    """A file name that belongs to one task whatever its id holds: the same in each run, never another task's.

    >>> file_name("report-2012-07", ".html")
    'report-2012-07.html'
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", task_id)[:80].lstrip(".")
    if not plain or plain != task_id:
        plain += f"-{hashlib.sha256(task_id.encode()).hexdigest()[:12]}"
    return plain + suffix


def _sync_folder(folder: Path) -> None:
    # The new name is on disk only when the folder is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
