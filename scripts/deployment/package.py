"""The code of the Lambda functions as one zip: the same input gives the same bytes, and the name tells the content.

Lambda's Python brings none of our dependencies, so the zip has them as wheels for Lambda's platform, in the versions
of `constraints.txt`. The functions of a local engine are processes of this Python: they need our own folder only.
Machines get wheels of the same versions for theirs.

    .venv/bin/python scripts/deployment/package.py --bucket my-artefacts --region eu-central-1
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from thunderagent.model.errors import AccessDenied, ConfigurationError, StoreError

ROOT: Final = Path(__file__).resolve().parents[2]
EXTRAS: Final = ("wsapi",)
"""What the functions need beside the package itself."""
MOST_UNPACKED: Final = 250 * 1024 * 1024
"""Lambda's limit for a zip out of a bucket, unpacked."""
PREFIX: Final = "thunderagent/lambda"
BUILTIN: Final = "builtin"
"""Folder of keys with ThunderAgent's own code and nothing of a user's: the next version may take its place."""
PIP_S: Final = 600.0

CONSTRAINTS: Final = "constraints.txt"
"""Versions of what ThunderAgent needs, as tested; a project may have a file of that name with its own."""

_ARCHITECTURES: Final = {"x86_64": "x86_64", "arm64": "aarch64"}
_GLIBC: Final = {"3.11": 26, "3.12": 34, "3.13": 34}
"""Minor version of the C library of Lambda's Pythons: Amazon Linux 2 has 2.26, Amazon Linux 2023 has 2.34."""
_MACHINE_GLIBC: Final = 34
"""The same of machines, which are Amazon Linux 2023."""
_LEFT_OUT: Final = frozenset({"__pycache__", ".DS_Store"})
SKIPPED: Final = tuple(
    line
    for line in (ROOT / "scripts" / "skipped").read_text(encoding="utf-8").splitlines()
    if line[:1] not in ("", "#")
)
_INSTALLER_FILES: Final = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
_MOMENT: Final = (1980, 1, 1, 0, 0, 0)
"""The earliest that a zip can tell; the time of a file is no part of its content."""

Install = Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A zip of Lambda code."""

    path: Path
    digest: str
    """SHA-256 of the names and contents in it, in hex digits: it does not depend on how they are packed."""
    files: int
    packed: int
    """Bytes of the zip."""
    unpacked: int
    """Bytes of its files."""
    is_builtin: bool
    """Whether it has no more than ThunderAgent's own code."""

    @property
    def key(self) -> str:
        """Its place in the bucket: other content has another key, so that a stack sees new code as a change."""
        folder = f"{PREFIX}/{BUILTIN}" if self.is_builtin else PREFIX
        return f"{folder}/{self.digest[:32]}.zip"

    def __str__(self) -> str:
        packed, unpacked = self.packed / 1e6, self.unpacked / 1e6
        return f"{self.files} files, {packed:.1f} MB, {unpacked:.1f} MB unpacked"


def build(
    output: Path,
    *,
    local: bool = False,
    architecture: str = "x86_64",
    python: str = "3.12",
    extra: Sequence[Path] = (),
    install: Install | None = None,
) -> Package:
    """Make the zip.

    Args:
        output: the zip; it is overwritten.
        local: for a local engine: our own code without dependencies.
        architecture: `x86_64` or `arm64`.
        python: version of Lambda's Python, such as `3.12`.
        extra: folders whose files go to the top of the zip, such as the module of your router and its jobs; what
            `scripts/skipped` names is left out.
        install: puts the dependencies into a folder; None: pip does.

    Raises:
        ConfigurationError: an argument is none of those; a folder is missing; two files want one name; pip is missing
            or failed, with its last lines; or the content is over Lambda's limit.
    """
    if architecture not in _ARCHITECTURES:
        raise ConfigurationError(f"the architecture is {architecture!r}; Lambda has {' and '.join(_ARCHITECTURES)}")
    if python not in _GLIBC:
        raise ConfigurationError(f"the Python is {python!r}; write one of {', '.join(_GLIBC)}")
    with tempfile.TemporaryDirectory(prefix="thunderagent-lambda-") as name:
        folder = Path(name)
        content: dict[str, Path] = {}
        if not local:
            (install or _pip(architecture, python))(folder)
            _remove_notes(folder)
            _add(content, folder, folder)
        _add(content, ROOT / "thunderagent", ROOT)
        for one in extra:
            if not one.is_dir():
                raise ConfigurationError(f"there is no folder {one}, whose files are to go into the Lambda code")
            _add(content, one, one, is_project=True)
        return _write(output, content, is_builtin=not extra)


def upload(package: Package, bucket: str, s3: Any, *, owner: str | None = None) -> str:
    """Put the zip into a bucket, unless it is there already.

    Args:
        package: what `build` made.
        bucket: name of the bucket; it must be in the region of the functions.
        s3: a client of S3.
        owner: number of the account that the bucket must belong to; None: any.

    Returns:
        Its key.

    Raises:
        ConfigurationError: there is no such bucket.
        AccessDenied: a permission for the bucket is missing.
        StoreError: S3 did not do it.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    place = {"Bucket": bucket, "Key": package.key} | ({"ExpectedBucketOwner": owner} if owner else {})
    try:
        if not _is_there(s3, place):
            with package.path.open("rb") as body:
                s3.put_object(**place, Body=body, ChecksumAlgorithm="SHA256")
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code"))
        if code in ("NoSuchBucket", "404"):
            raise ConfigurationError(
                f"there is no bucket {bucket!r}; make it with: aws s3 mb s3://{bucket} --region REGION"
            ) from error
        if code in ("AccessDenied", "403"):
            raise AccessDenied(
                f"the Lambda code cannot be put to s3://{bucket}/{package.key}: allow s3:PutObject and s3:GetObject on "
                f"arn:aws:s3:::{bucket}/{PREFIX}/* and s3:ListBucket on arn:aws:s3:::{bucket}"
                + (f"; does the bucket belong to the account {owner}?" if owner else "")
            ) from error
        raise StoreError(f"the Lambda code cannot be put to s3://{bucket}/{package.key}: {error}") from error
    except BotoCoreError as error:
        raise StoreError(f"the Lambda code cannot be put to s3://{bucket}/{package.key}: {error}") from error
    return package.key


def is_skipped(parts: Sequence[str]) -> bool:
    """Whether a path within a project, in its parts, is no part of it: caches, environments, secrets."""
    return any(fnmatch(part, pattern) for part in parts for pattern in SKIPPED)


def requirements(root: Path = ROOT) -> list[str]:
    """What the package and its functions depend on, as `setup.cfg` has it."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(root / "setup.cfg", encoding="utf-8")
    lists = [config["options"]["install_requires"], *(config["options.extras_require"][name] for name in EXTRAS)]
    return [line.strip() for text in lists for line in text.splitlines() if line.strip()]


def processor(instance_type: str) -> str:
    """The architecture of an EC2 instance type: a `g` behind the number of its generation stands for Graviton."""
    return "arm64" if re.match(r"(a1|[a-z-]+[0-9]+g[a-z]*)\.", instance_type) else "x86_64"


def platforms(architecture: str, glibc: int) -> list[str]:
    """Platforms of wheels that run with a C library 2.`glibc`, the newest first."""
    machine = _ARCHITECTURES[architecture]
    return [*(f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 16, -1)), f"manylinux2014_{machine}"]


def download_wheels(
    folder: Path, projects: Sequence[tuple[Path, str]], constraints: Path, *, architecture: str, python: str
) -> None:
    """Put wheels of projects, and of all that they need, into a folder: machines install them without an index.

    Args:
        folder: where to.
        projects: folder of each project, which pip may write to, and its extras, such as `[demo]`.
        constraints: versions, also of what builds the projects.
        architecture: `x86_64` or `arm64`.
        python: version of the machines' Python, such as `3.11`.

    Raises:
        ConfigurationError: pip is missing or failed, with its last lines and the remedy.
    """
    wanted: list[str] = []
    pins = {"PIP_CONSTRAINT": str(constraints), "PIP_BUILD_CONSTRAINT": str(constraints)}
    for project, extras in projects:
        if any((project / name).is_file() for name in ("pyproject.toml", "setup.py")):
            built = project / "built-wheel"
            _run_pip(
                ["wheel", "--no-deps", "--wheel-dir", str(built), str(project)],
                f"pip could not build {project.name}",
                {**pins, "SOURCE_DATE_EPOCH": "315532800"},  # the same files give the same wheel
            )
            wanted += [f"{path}{extras}" for path in built.iterdir()]
        else:
            wanted += ["--requirement", str(project / "requirements.txt")]
    _run_pip(
        [
            *("download", "--dest", str(folder), "--constraint", str(constraints)),
            *_for_platform(python, [*platforms(architecture, _MACHINE_GLIBC), f"linux_{_ARCHITECTURES[architecture]}"]),
            *wanted,
        ],
        f"pip found no wheels for Python {python} on {architecture}",
    )


def _pip(architecture: str, python: str) -> Install:
    def install(folder: Path) -> None:
        _run_pip(
            [
                *("install", "--no-compile", "--target", str(folder), "--constraint", str(ROOT / CONSTRAINTS)),
                *_for_platform(python, platforms(architecture, _GLIBC[python])),
                *requirements(),
            ],
            f"pip found no wheels for Python {python} on {architecture}",
        )

    return install


def _for_platform(python: str, names: Sequence[str]) -> list[str]:
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return options + [f"--platform={name}" for name in names]


def _run_pip(arguments: Sequence[str], failed: str, environment: Mapping[str, str] | None = None) -> None:
    if find_spec("pip") is None:
        raise ConfigurationError(
            f"code is made with pip, which {sys.executable} does not have; install it with: python -m ensurepip"
        )
    verb, *rest = arguments
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *rest]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=PIP_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"pip did not end within {PIP_S:g} s: is its index within reach?") from error
    if done.returncode:
        told = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise ConfigurationError(f"{failed}:\n{told}{_remedy(done.stderr)}")


def _remedy(said: str) -> str:
    """What can be done about an error of pip."""
    if missing := re.search(r"No matching distribution found for ([^\s;]+)", said):
        return (
            f"\nIf {missing[1]} has no wheel for that platform, make one on such a machine with: pip wheel --no-deps "
            f"{missing[1]}, and name its folder here with PIP_FIND_LINKS"
        )
    if "ResolutionImpossible" in said:
        return f"\nVersions of your own belong into {CONSTRAINTS} in the folder of your project, in place of ours"
    return ""


def _add(content: dict[str, Path], folder: Path, top: Path, *, is_project: bool = False) -> None:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(top).parts
        if not path.is_file() or path.suffix == ".pyc" or _LEFT_OUT & set(parts):
            continue
        if is_project and is_skipped(parts):
            continue
        name = "/".join(parts)
        if name in content:
            raise ConfigurationError(f"{content[name]} and {path} would both be {name} in the Lambda code: rename one")
        content[name] = path


def _remove_notes(folder: Path) -> None:
    """What pip notes of an installation, and its commands, name folders of this machine."""
    shutil.rmtree(folder / "bin", ignore_errors=True)
    for notes in folder.glob("*.dist-info"):
        for name in _INSTALLER_FILES:
            (notes / name).unlink(missing_ok=True)


def _write(output: Path, content: Mapping[str, Path], *, is_builtin: bool) -> Package:
    sizes: Counter[str] = Counter()
    total = hashlib.sha256()
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(content):
            data = content[name].read_bytes()
            total.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
            sizes[name.partition("/")[0]] += len(data)
            entry = zipfile.ZipInfo(name, _MOMENT)
            entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(entry, data)
    unpacked = sizes.total()
    if unpacked > MOST_UNPACKED:
        part.unlink()
        largest = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.most_common(3))
        raise ConfigurationError(
            f"the Lambda code has {unpacked / 1e6:.0f} MB and Lambda takes {MOST_UNPACKED / 1e6:.0f} MB unpacked; "
            f"the largest are {largest}: leave out what the functions do not use"
        )
    part.replace(output)
    return Package(
        path=output,
        digest=total.hexdigest(),
        files=len(content),
        packed=output.stat().st_size,
        unpacked=unpacked,
        is_builtin=is_builtin,
    )


def _is_there(s3: Any, place: Mapping[str, str]) -> bool:
    from botocore.exceptions import ClientError

    try:
        found = s3.head_object(**place)
    except ClientError as error:
        # A HEAD has no body: 404 is a missing object or a missing bucket, which the upload will tell.
        if str(error.response.get("Error", {}).get("Code")) in ("404", "NoSuchKey", "NotFound"):
            return False
        raise
    return bool(found["ContentLength"] > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the zip, and upload it when a bucket is named; prints where it is."""
    parser = argparse.ArgumentParser(
        prog="package.py",
        description="Make the zip of the Lambda functions: WebSocket API, canary, and your router with --extra.",
        epilog="Example: .venv/bin/python scripts/deployment/package.py --bucket my-artefacts --region eu-central-1",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "lambda.zip", help="the zip (build/lambda.zip)")
    parser.add_argument("--local", action="store_true", help="for a local engine: without dependencies")
    parser.add_argument("--architecture", default="x86_64", help="x86_64 or arm64 (x86_64)")
    parser.add_argument("--python", default="3.12", help="Lambda's Python (3.12)")
    parser.add_argument("--extra", type=Path, action="append", default=[], help="folder with more files; repeatable")
    parser.add_argument("--bucket", help="upload it there")
    parser.add_argument("--region", help="region of the bucket (that of the environment)")
    given = parser.parse_args(arguments)
    try:
        package = build(
            given.output, local=given.local, architecture=given.architecture, python=given.python, extra=given.extra
        )
        print(f"{package.path}: {package}")
        if given.bucket:
            import boto3

            key = upload(package, given.bucket, boto3.client("s3", region_name=given.region))
            print(f"s3://{given.bucket}/{key}")
    except (ConfigurationError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
