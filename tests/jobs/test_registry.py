"""Collecting the jobs of a package, and what is told when it cannot be done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from thunderagent.jobs.job import Job
from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import ConfigurationError, JobImportError, UnknownJob

JOB = """
from typing import Any
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

@job("{name}", queue="{queue}")
def {function}(ctx: Context, payload: dict[str, Any]) -> None: ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package `some_jobs` that can be imported."""
    folder = tmp_path / "some_jobs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("some_jobs", "loose_jobs")]:
        del sys.modules[name]


def add(folder: Path, module: str, name: str, queue: str = "default", function: str = "handler") -> None:
    path = folder / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(JOB.format(name=name, queue=queue, function=function), encoding="utf-8")


def refused(package: str = "some_jobs") -> str:
    with pytest.raises(JobImportError) as caught:
        Registry.from_package(package)
    return str(caught.value)


def test_every_module_of_a_package_is_imported_however_deep(package: Path) -> None:
    add(package, "one", "a.one", "reports")
    add(package, "inner/__init__", "a.two")
    add(package, "inner/deep", "a.three", "reports")
    registry = Registry.from_package("some_jobs")
    assert sorted(registry) == ["a.one", "a.three", "a.two"]
    assert sorted(registry.queues) == ["default", "reports"]
    assert len(registry) == 3
    assert "a.one" in registry
    assert "a.four" not in registry


def test_a_single_module_will_do(package: Path) -> None:
    add(package.parent, "loose_jobs", "a.loose")
    assert list(Registry.from_package("loose_jobs")) == ["a.loose"]


def test_a_job_that_one_module_imports_from_another_is_still_one_job(package: Path) -> None:
    add(package, "one", "a.one")
    (package / "two.py").write_text("from some_jobs.one import handler\nalias = handler\n", encoding="utf-8")
    assert list(Registry.from_package("some_jobs")) == ["a.one"]


def test_two_jobs_with_one_name_are_both_named(package: Path) -> None:
    add(package, "one", "a.same", function="first")
    add(package, "two", "a.same", function="second")
    with pytest.raises(ConfigurationError) as caught:
        Registry.from_package("some_jobs")
    assert "two jobs are named 'a.same'" in str(caught.value)
    assert "some_jobs.one.first" in str(caught.value)
    assert "some_jobs.two.second" in str(caught.value)


def test_a_module_that_does_not_import_is_told_with_file_and_line(package: Path) -> None:
    (package / "broken.py").write_text("\n\nvalue = 1 / 0\n", encoding="utf-8")
    text = refused()
    assert text.startswith("some_jobs.broken does not import: ZeroDivisionError: division by zero")
    assert f"{package / 'broken.py'}:3" in text


def test_a_missing_dependency_of_a_module_is_not_taken_for_a_missing_package(package: Path) -> None:
    (package / "needs.py").write_text("import surely_not_installed\n", encoding="utf-8")
    text = refused()
    assert "some_jobs.needs does not import: ModuleNotFoundError" in text
    assert "surely_not_installed" in text
    assert f"{package / 'needs.py'}:1" in text


def test_a_syntax_error_is_told_with_file_and_line(package: Path) -> None:
    (package / "wrong.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    text = refused()
    assert "SyntaxError" in text
    assert f"{package / 'wrong.py'}:2" in text


def test_a_job_whose_options_cannot_work_is_a_configuration_error(package: Path) -> None:
    add(package, "one", "a.one", queue="a b")
    with pytest.raises(ConfigurationError, match="'a b' cannot be the name of a queue"):
        Registry.from_package("some_jobs")


def test_a_package_that_is_not_there_is_told_with_the_remedy(package: Path) -> None:
    text = refused("no_such_jobs")
    assert text.startswith("there is no package 'no_such_jobs'")
    assert "run the command in the folder that holds it" in text


def test_a_package_without_jobs_is_refused(package: Path) -> None:
    assert "there is no job in 'some_jobs'" in refused()


def test_the_main_module_of_a_package_is_not_run(package: Path) -> None:
    add(package, "one", "a.one")
    (package / "__main__.py").write_text("raise SystemExit('run')\n", encoding="utf-8")
    assert list(Registry.from_package("some_jobs")) == ["a.one"]


def test_an_unknown_job_is_told_with_the_known_ones(package: Path) -> None:
    add(package, "one", "a.one")
    add(package, "two", "a.two")
    registry = Registry.from_package("some_jobs")
    assert isinstance(registry["a.one"], Job)
    with pytest.raises(UnknownJob, match=r"no job is named 'a\.three'; known are: a\.one, a\.two"):
        registry["a.three"]
    with pytest.raises(UnknownJob, match="known are: none"):
        Registry()["a.one"]
