"""The code that stacks run: a user's stays until a run brings other, ThunderAgent's own is that of this version."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from deployment import artefacts, package
from deployment.cloud import Cloud
from deployment.errors import DeploymentError, WrongOption
from deployment.templates import Parameter
from deployment.values import given_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Code as a template asks for it."""

    option: str
    bucket: str
    key: str
    """Parameters with its place."""
    entry: str
    """Parameter with what is started of it; a template without it has nothing to start but ThunderAgent's own code."""
    builtin: tuple[str, ...]
    """Packages in ThunderAgent's own code."""
    built_for: tuple[str, ...]
    """Parameters that decide what is in it."""


KINDS: Final = (
    Kind(
        option="--source",
        bucket="ArtefactBucket",
        key="ArtefactKey",
        entry="Jobs",
        builtin=("jobs", "thunderagent"),
        built_for=("InstanceType", "Python", "Tracing"),
    ),
    Kind(
        option="--code",
        bucket="CodeBucket",
        key="CodeKey",
        entry="Handler",
        builtin=("thunderagent",),
        built_for=("Architecture", "Runtime"),
    ),
)
HASHED: Final = re.compile(r".*/[0-9a-f]{64}\.tar\.gz")
"""Keys that machines can check what they fetch against; earlier versions had half of a hash."""
PLACES: Final = frozenset(name for kind in KINDS for name in (kind.bucket, kind.key))


@dataclass(slots=True, kw_only=True)
class Code:
    """The code of one run.

    Args:
        cloud: where.
        console: what it says.
        prefix: of the stacks' names, and of the bucket's.
        source: folder of the project whose jobs the agents run; None: what the stack has.
        folders: more code for the functions; none: what the stack has.
        bucket: for new code; None: the stack's, or one that is made.
        is_builtin: ThunderAgent's own code takes the place of a user's.
    """

    cloud: Cloud
    console: Console
    prefix: str
    source: Path | None = None
    folders: Sequence[Path] = ()
    bucket: str | None = None
    is_builtin: bool = False
    _zips: dict[tuple[object, ...], str] = field(default_factory=dict)
    """Keys of what this run has made."""
    _has_bucket: bool = False

    def check(
        self, stack: str, parameters: Mapping[str, Parameter], given: Mapping[str, str], before: Mapping[str, str]
    ) -> None:
        """Refuse what cannot work, before anything is done.

        Args:
            stack: its name.
            parameters: of its template.
            given: of the command line.
            before: the values that the stack has.

        Raises:
            WrongOption: the options do not fit the code that stays, or ThunderAgent's own code.
            DeploymentError: the code that stays is gone.
        """
        kind = _kind(parameters)
        if kind is None:
            return
        asked = {name: value for name in parameters if (value := given_to(stack, name, given)) is not None}
        if self.bucket is not None:
            asked.setdefault(kind.bucket, self.bucket)
        remedy = self._remedy(kind, stack)
        bucket = asked.get(kind.bucket, before.get(kind.bucket, ""))
        if key := asked.get(kind.key):
            if self._brings(kind, parameters):
                raise WrongOption(f"{kind.option} and {kind.key}={key}: give one of them")
            if bucket and artefacts.is_gone(self.cloud, bucket, key):
                raise WrongOption(f"{kind.key}={key} of {stack} is not in the bucket {bucket}")
            _refuse_unhashed(kind, stack, key, remedy)
        elif self._brings(kind, parameters):
            return
        elif self._stays(kind, parameters, before):
            _refuse_unhashed(kind, stack, before[kind.key], remedy)
            for name in (kind.bucket, *kind.built_for):
                if name in asked and _platform(name, asked[name]) != _platform(name, before.get(name, "")):
                    raise WrongOption(
                        f"{stack} keeps its code, with {name}={before.get(name)}: for {name}={asked[name]} give "
                        f"{remedy} too"
                    )
            if artefacts.is_gone(self.cloud, bucket, key := before[kind.key]):
                raise DeploymentError(f"the code of {stack}, s3://{bucket}/{key}, is gone: give {remedy}")
        elif kind.entry in parameters:
            entry = asked.get(kind.entry) or before.get(kind.entry) or parameters[kind.entry].default or ""
            if entry.partition(".")[0] not in kind.builtin or not _is_ours(entry):
                raise WrongOption(
                    f"{kind.entry}={entry} of {stack} is not in ThunderAgent's own code: give the folder that has it "
                    f"with {kind.option}, or --parameter {stack}.{kind.entry}={parameters[kind.entry].default}"
                )

    def refuse_unused(self, known: Mapping[str, Mapping[str, Parameter]]) -> None:
        """Code that no stack of the run takes is a mistake.

        Raises:
            WrongOption: there is such code, or code of two kinds at once.
        """
        for kind in KINDS:
            if not self._is_given(kind):
                continue
            if self.is_builtin:
                raise WrongOption(f"{kind.option} and --builtin: give one of them")
            if not any(self._brings(kind, parameters) for parameters in known.values()):
                raise WrongOption(f"{kind.option}: none of {', '.join(known)} takes it")

    def make(
        self,
        stack: str,
        parameters: Mapping[str, Parameter],
        values: Mapping[str, str],
        given: Mapping[str, str],
        before: Mapping[str, str],
    ) -> dict[str, str]:
        """Put what a stack is to run into its bucket; the parameters with its place, none if it keeps what it has."""
        kind = _kind(parameters)
        if kind is None or given_to(stack, kind.key, given) is not None:
            return {kind.bucket: self.bucket} if kind and self.bucket else {}
        brings = self._brings(kind, parameters)
        if self._stays(kind, parameters, before) and not brings:
            self._say(
                f"its code stays, and the ThunderAgent in it: s3://{before.get(kind.bucket)}/{before[kind.key]}; "
                f"new code: {self._remedy(kind, stack)}"
            )
            return {}
        bucket = self._bucket(given_to(stack, kind.bucket, given) or self.bucket or before.get(kind.bucket))
        if brings:
            self._warn_of_entry(stack, kind, values[kind.entry])
        if kind.option == "--source":
            key = self._artefact(bucket, values)
        else:
            key = self._zip(bucket, self.folders if brings else (), values)
        return {kind.bucket: bucket, kind.key: key}

    def _is_given(self, kind: Kind) -> bool:
        return self.source is not None if kind.option == "--source" else bool(self.folders)

    def _brings(self, kind: Kind, parameters: Mapping[str, Parameter]) -> bool:
        """Whether the command line has a user's code for a template."""
        return kind.key in parameters and kind.entry in parameters and self._is_given(kind)

    def _stays(self, kind: Kind, parameters: Mapping[str, Parameter], before: Mapping[str, str]) -> bool:
        """Whether a stack has code that is not ours to replace; one with nothing to start but ours never has."""
        is_users = kind.entry in parameters and kind.key in before and not artefacts.is_builtin(before[kind.key])
        return is_users and not self.is_builtin

    def _remedy(self, kind: Kind, stack: str) -> str:
        return f"{kind.option} FOLDER, or --stack {stack} --builtin"

    def _warn_of_entry(self, stack: str, kind: Kind, entry: str) -> None:
        """What is to run is mostly in the folders that are given for it."""
        folders = [self.source] if kind.option == "--source" and self.source else self.folders
        if not any(artefacts.has_module(folder, entry.partition(".")[0]) for folder in folders):
            where = escape(", ".join(map(str, folders)))
            self.console.print(
                f"  [yellow]{kind.entry}={escape(entry)} is not in {where}[/]: name what is to run with --parameter "
                f"{stack}.{kind.entry}=…",
                highlight=False,
                soft_wrap=True,
            )

    def _artefact(self, bucket: str, values: Mapping[str, str]) -> str:
        with tempfile.TemporaryDirectory(prefix="thunderagent-deploy-") as folder:
            wheels = None
            if self.cloud.endpoint is None:  # machines of a local engine install nothing
                wheels = Path(folder)
                architecture, python = package.processor(values["InstanceType"]), values["Python"]
                self._say(f"making wheels for Python {python} on {architecture}")
                artefacts.make_wheels(
                    wheels,
                    self.source,
                    architecture=architecture,
                    python=python,
                    is_traced=values["Tracing"] == "true",
                )
            key, content = artefacts.pack(self.source, wheels)
        artefacts.put(self.cloud, bucket, key, content)
        jobs = self.source or "ThunderAgent's own jobs (for yours give --source FOLDER)"
        self._say(f"the agents run {jobs}: {len(content) / 1e6:.1f} MB in s3://{bucket}/{key}")
        return key

    def _zip(self, bucket: str, folders: Sequence[Path], values: Mapping[str, str]) -> str:
        """Make the zip of functions, once a run for all that want the same."""
        architecture, runtime = values.get("Architecture", "x86_64"), values.get("Runtime", "python3.12")
        same = (bucket, bool(folders), architecture, runtime)
        if same not in self._zips:
            self._say(" with ".join(["making the code of the functions", *map(str, folders)]))
            with tempfile.TemporaryDirectory(prefix="thunderagent-deploy-") as folder:
                made = package.build(
                    Path(folder) / "lambda.zip",
                    local=self.cloud.endpoint is not None,
                    architecture=architecture,
                    python=runtime.removeprefix("python"),
                    extra=folders,
                )
                owner = None if self.cloud.endpoint else self.cloud.account
                self._zips[same] = package.upload(made, bucket, self.cloud.client("s3"), owner=owner)
            self._say(f"{made} in s3://{bucket}/{made.key}")
        return self._zips[same]

    def _bucket(self, name: str | None) -> str:
        """The bucket of this name, or the deployment's own, which is made when it is missing."""
        own = artefacts.bucket_name(self.cloud, self.prefix)
        if name in (None, own) and not self._has_bucket:
            for words in artefacts.ensure_bucket(self.cloud, own):
                self._say(words)
            self._has_bucket = True
        return name or own

    def _say(self, words: str) -> None:
        self.console.print(f"  {escape(words)}", highlight=False, soft_wrap=True)


def _refuse_unhashed(kind: Kind, stack: str, key: str, remedy: str) -> None:
    if kind.key == "ArtefactKey" and not HASHED.fullmatch(key):
        raise WrongOption(
            f"the code of {stack}, {key}, is of an earlier version and has no hash that a machine can check: "
            f"give {remedy}"
        )


def _is_ours(entry: str) -> bool:
    """Whether ThunderAgent's own code has this module, or function of a module: earlier versions had others."""
    names = entry, entry.rpartition(".")[0]
    paths = [package.ROOT.joinpath(*name.split(".")) for name in names if name]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


def _platform(name: str, value: str) -> str:
    """What code is built for, of the value of a parameter."""
    return package.processor(value) if name == "InstanceType" else value


def _kind(parameters: Mapping[str, Parameter]) -> Kind | None:
    return next((kind for kind in KINDS if kind.key in parameters), None)
