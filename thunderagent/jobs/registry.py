"""Collects the jobs of a package."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from thunderagent.jobs.hooks import Hook
from thunderagent.jobs.job import Job
from thunderagent.model.errors import ConfigurationError, JobImportError, UnknownJob
from thunderagent.model.names import meant


class Registry(Mapping[str, Job[Any]]):
    """The jobs that an agent can run, by name, and the hooks that it calls."""

    def __init__(self, *jobs: Job[Any] | Hook) -> None:
        self._jobs: dict[str, Job[Any]] = {}
        self._by_value: dict[str, Job[Any]] = {}
        self._hooks: dict[Hook, None] = {}
        self.packages: tuple[str, ...] = ()
        """Where the jobs were found; a child process imports them before it runs a handler."""
        for one in jobs:
            self.add(one)

    def add(self, one: Job[Any] | Hook) -> None:
        """Add a job or a hook.

        Raises:
            ConfigurationError: another job has this name.
        """
        if isinstance(one, Hook):
            self._hooks[one] = None
            return
        other = self._jobs.setdefault(one.name, one)
        if other is not one:
            raise ConfigurationError(f"two jobs are named {one.name!r}: {other.where} and {one.where}; rename one")
        self._by_value.update(dict.fromkeys(one.job_values, one))

    def plus(self, more: Iterable[Job[Any]]) -> Registry:
        """A registry with further jobs; this one stays as it is.

        Raises:
            ConfigurationError: another job has the name of one of them.
        """
        registry = Registry(*self._jobs.values(), *self._hooks, *more)
        registry.packages = self.packages
        return registry

    def __getitem__(self, name: str) -> Job[Any]:
        try:
            return self._jobs[name]
        except KeyError:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise UnknownJob(f"no job is named {name!r}; known are: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, name: object) -> bool:
        return name in self._jobs

    @property
    def by_value(self) -> Mapping[str, Job[Any]]:
        """The jobs by the attribute `job` of the tasks that they take: once for each version."""
        return self._by_value

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """What `@on` and `@around` have marked, in the order in which it was found."""
        return tuple(self._hooks)

    def check_hooks(self) -> None:
        """Check that hooks with `jobs` name jobs that are here: a misspelt one would never be called.

        Raises:
            ConfigurationError: some do not; all problems are listed.
        """
        problems = [
            f"{hook.name} is about the job {name!r}, and no job is named so{meant(name, self._jobs)}"
            for hook in self._hooks
            for name in sorted((hook.jobs or frozenset()) - self._jobs.keys())
        ]
        if problems:
            raise ConfigurationError("these hooks cannot work:\n" + "\n".join(f"  - {one}" for one in problems))

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.queue for one in self._jobs.values()))

    @classmethod
    def from_package(cls, package: str) -> Registry:
        """Import every module of a package (or one module) and collect the jobs and hooks found there.

        Raises:
            JobImportError: the package does not exist or a path was given, a module does not import (with file and
              line), or no job is there.
            ConfigurationError: two jobs have one name, a job's options cannot work, or a hook names none of these jobs.
        """
        if "/" in package or package.endswith(".py"):
            raise JobImportError(_not_a_path(Path(package)))
        registry = cls()
        registry.packages = (package,)
        for module in _modules(package):
            for value in vars(module).values():
                if isinstance(value, (Job, Hook)):
                    registry.add(value)
        if not registry:
            raise JobImportError(f"there is no job in {package!r}: decorate a handler with @job")
        registry.check_hooks()
        return registry


def _modules(package: str) -> Iterator[ModuleType]:
    root = _import(package)
    yield root
    for found in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}."):
        if found.name.rpartition(".")[2] != "__main__":
            yield _import(found.name)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigurationError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            raise JobImportError(
                f"there is no package {name!r}: run the command in the folder that holds it, or install it"
            ) from error
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        else:
            place = _place(error, name.partition(".")[0])
        raise JobImportError(f"{name} does not import: {type(error).__name__}: {error} ({place})") from error


def _not_a_path(path: Path) -> str:
    """What to write instead of the path of a package, from the folder that holds it."""
    inside = path.with_suffix("") if path.suffix == ".py" else path
    if path.is_absolute() or ".." in path.parts:
        name, folder = inside.resolve().name, f", in the folder {path.parent} that holds it"
    else:
        name, folder = ".".join(inside.parts) or inside.resolve().name, ""
    return f"name a package, not a path: {name}{folder}"


def _place(error: Exception, package: str) -> str:
    """The last line of the package that led to an error; lines of libraries are of less use."""
    frames = traceback.extract_tb(error.__traceback__)
    found = importlib.util.find_spec(package)
    ours = tuple(found.submodule_search_locations or [found.origin or ""]) if found else ()
    last = next((frame for frame in reversed(frames) if frame.filename.startswith(ours)), frames[-1])
    return f"{last.filename}:{last.lineno}"
