"""Versions of jobs: brings the payload of a task that older code has put up to this code's version."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from thunderagent.model.arguments import shown
from thunderagent.model.errors import PayloadInvalid
from thunderagent.model.jsondata import dump_json
from thunderagent.model.names import NEWEST

Upcaster = Callable[[Any], Any]
"""Makes the payload of the next version, both as JSON data. The same for the same, always: it runs with each
attempt, in any agent."""


def version_problems(version: int, upcasters: Mapping[int, Upcaster]) -> list[str]:
    """Problems of a job's version and of the upcasters that lead to it."""
    if type(version) is not int or not 1 <= version <= NEWEST:
        return [f"version is {shown(version)}; use a whole number from 1 to {NEWEST}"]
    if not isinstance(upcasters, Mapping):
        return [f"upcasters is {shown(upcasters)}; use a mapping, such as {{1: from_1_to_2}}"]
    problems = []
    for known, upcaster in upcasters.items():
        if type(known) is not int or not 1 <= known < version:
            problems.append(
                f"upcasters has {shown(known)}: its keys are the versions that are brought up, all below {version}"
            )
        elif not callable(upcaster) or inspect.iscoroutinefunction(upcaster):
            problems.append(
                f"the upcaster from version {known} is {shown(upcaster)}; use a plain function of the payload"
            )
    if problems or not upcasters:
        return problems
    missing = sorted(set(range(min(upcasters), version)) - set(upcasters))
    return [f"upcasters has none from version {one} to {one + 1}, so nothing older gets there" for one in missing]


def bring_up(text: str, job: str, *, since: int, version: int, upcasters: Mapping[int, Upcaster]) -> str:
    """A payload of version `since` as one of `version`, both as JSON text.

    Raises:
        PayloadInvalid: no upcaster leads there, one failed, or its answer is no JSON data. The text names no value of
            the
          payload, which may be a secret.
    """
    if since > version:
        raise PayloadInvalid(
            f"the payload is one of version {since} of the job {job!r}; this code has version {version}"
        )
    data = json.loads(text)
    for number in range(since, version):
        if number not in upcasters:
            raise PayloadInvalid(f"the job {job!r} has no upcaster from version {number}: it takes no payload of then")
        try:
            data = upcasters[number](data)
        except Exception as error:
            what = f"{type(error).__name__} at {_place(error)}"
            raise PayloadInvalid(f"the upcaster of {job!r} from version {number} failed: {what}") from error
    return dump_json(data, f"the payload of {job!r}, brought up from version {since},", PayloadInvalid)


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(PurePath(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}"
