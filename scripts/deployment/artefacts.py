"""What machines and functions run, in a bucket: keys are made of the content, so that new code is a change."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import ClientError

from deployment.cloud import Cloud
from deployment.errors import DeploymentError, WrongOption, told
from deployment.package import BUILTIN, CONSTRAINTS, download_wheels, is_skipped
from deployment.package import PREFIX as FUNCTIONS
from deployment.plan import ROOT

PREFIX: Final = "thunderagent/agents"
PARTS: Final = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "pytest_thunderagent.py", CONSTRAINTS)
FOLDERS: Final = ("jobs", "systemd", "thunderagent")
SCRIPTS: Final = ("complete-termination", "install-ec2", "rolling-restart", "skipped", "with-environment")
"""What `scripts/install-ec2` needs on a machine, and what the machine does when it goes."""

NONCURRENT_DAYS: Final = 30
UPLOAD_DAYS: Final = 7
"""Days until an overwritten or deleted version, and an upload that was never ended, are gone for good."""

LARGEST: Final = 100 * 1024 * 1024
"""Bytes of a project; more is a mistake, such as a folder of data."""


def check_source(source: Path) -> None:
    """Whether a folder can be what machines install.

    Raises:
        WrongOption: there is no such folder, or nothing in it says how to install it.
    """
    if not source.is_dir():
        raise WrongOption(f"--source {source} is not a folder")
    if not any((source / name).is_file() for name in ("pyproject.toml", "setup.py", "requirements.txt")):
        raise WrongOption(f"--source {source} has neither pyproject.toml nor setup.py nor requirements.txt")


def make_wheels(folder: Path, source: Path | None, *, architecture: str, python: str, is_traced: bool = False) -> None:
    """Put all that machines install into a folder, as wheels: ThunderAgent, the project, and what they need.

    Args:
        folder: where to.
        source: as `pack` takes it; its own `constraints.txt` takes the place of ours.
        architecture: `x86_64` or `arm64`.
        python: version of the machines' Python, such as `3.11`.
        is_traced: with what sends spans; a project that names hashes must have it itself.

    Raises:
        ConfigurationError: pip found no wheel of something, or nothing that fits together.
    """
    with tempfile.TemporaryDirectory(prefix="thunderagent-wheels-") as name:
        own, project = Path(name) / "thunderagent", Path(name) / "project"
        _copy(own, _own())
        traces = "[traces]" if is_traced else ""
        if source is None:
            projects = [(own, "[demo,traces]" if is_traced else "[demo]")]
        else:
            _copy(project, _files(source))
            projects = [(project, "")] if _is_locked(project) else [(own, traces), (project, "")]
        constraints = next(one / CONSTRAINTS for one in (project, own) if (one / CONSTRAINTS).is_file())
        download_wheels(folder, projects, constraints, architecture=architecture, python=python)


def pack(source: Path | None = None, wheels: Path | None = None) -> tuple[str, bytes]:
    """The key and the content of what machines install; the same files give the same bytes.

    The key holds the SHA-256 of the content, which a machine checks before root runs any of it.

    Args:
        source: the folder of a project with jobs; None: those of ThunderAgent itself.
        wheels: folder with all that is to be installed; None: machines ask an index.

    Raises:
        DeploymentError: there is no such folder, or it is very large.
    """
    files = dict(_own())
    if source is not None:
        check_source(source)
        files |= {f"source/{name}": path for name, path in _files(source)}
    size = sum(path.stat().st_size for path in files.values())
    if size > LARGEST:
        raise DeploymentError(f"the project has {size / 1e6:.0f} MB; leave out what is no code, {LARGEST / 1e6:.0f} MB")
    if wheels is not None:
        files |= {f"wheels/{path.name}": path for path in wheels.iterdir()}
    buffer = io.BytesIO()
    # No time, no owner and no name of the machine: they are no part of the content.
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name in sorted(files):
            data = files[name].read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = 0o755 if files[name].stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(data))
    content = buffer.getvalue()
    folder = f"{PREFIX}/{BUILTIN}" if source is None else PREFIX
    return f"{folder}/{hashlib.sha256(content).hexdigest()}.tar.gz", content


def is_builtin(key: str) -> bool:
    """Whether a key is that of ThunderAgent's own code; any other is a user's, which no run without it replaces."""
    return key.startswith((f"{PREFIX}/{BUILTIN}/", f"{FUNCTIONS}/{BUILTIN}/"))


def bucket_name(cloud: Cloud, prefix: str) -> str:
    """The bucket of a deployment; names are shared by all accounts of the world, so ours has the account in it."""
    return f"{prefix.lower()}-artefacts-{cloud.account}-{cloud.region}"


def ensure_bucket(cloud: Cloud, bucket: str) -> list[str]:
    """Make the bucket if it is missing, and give it each setting that it lacks; what there is to say of that.

    Raises:
        DeploymentError: it is somebody else's, or may not be made.
    """
    s3, said = cloud.client("s3"), []
    with told(f"looking at the bucket {bucket}"):
        try:
            s3.head_bucket(Bucket=bucket, **_owner(cloud))
        except ClientError as error:
            if not _is_missing(error):
                raise
            said.append(f"made the bucket {bucket}")
    with told(f"making the bucket {bucket}"):
        if said:
            is_default = cloud.region == "us-east-1"
            place = {} if is_default else {"CreateBucketConfiguration": {"LocationConstraint": cloud.region}}
            s3.create_bucket(Bucket=bucket, **place)
            s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": [{"Key": "made-by", "Value": "thunderagent"}]})
        # What is put takes the place of all that was there: an operator's own stays.
        own = [name for name, is_own in _settle(s3, bucket) if is_own]
        if own:
            said.append(f"the bucket {bucket} keeps its own {', '.join(own)}")
    return said


def _settle(s3: Any, bucket: str) -> Iterator[tuple[str, bool]]:
    """Put each setting that the bucket lacks; the names of all, and whether the bucket has another than ours."""
    block = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    blocked = {"PublicAccessBlockConfiguration": dict.fromkeys(block, True)}
    no_block = "NoSuchPublicAccessBlockConfiguration"
    policy = {"Policy": json.dumps(tls_only(bucket, s3.meta.partition))}
    rules = {"LifecycleConfiguration": {"Rules": [_LIFECYCLE]}}
    versioning = {"VersioningConfiguration": {"Status": "Enabled"}}
    # The name, the API's name, the error if there is none, what is put, and the mark of ours in what is there.
    for name, action, none, ours, mark in (
        ("public access block", "public_access_block", no_block, blocked, "'BlockPublicPolicy': True"),
        ("policy", "bucket_policy", "NoSuchBucketPolicy", policy, "TlsOnly"),
        ("lifecycle", "bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration", rules, _LIFECYCLE["ID"]),
        ("versioning", "bucket_versioning", "", versioning, "Enabled"),
    ):
        try:
            found = getattr(s3, f"get_{action}")(Bucket=bucket)
            found.pop("ResponseMetadata")
        except ClientError as error:
            if error.response["Error"]["Code"] != none:
                raise
            found = {}
        if not found:
            getattr(s3, f"put_{action}")(Bucket=bucket, **ours)
        yield name, bool(found) and str(mark) not in str(found)


_LIFECYCLE: Final = {
    # Current versions never expire: a machine may boot from the one that its stack names, in a year.
    "ID": "what-nothing-names",
    "Status": "Enabled",
    "Filter": {"Prefix": ""},
    "NoncurrentVersionExpiration": {"NoncurrentDays": NONCURRENT_DAYS},
    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": UPLOAD_DAYS},
}


def tls_only(bucket: str, partition: str = "aws") -> dict[str, Any]:
    """The policy of a bucket that answers nobody without TLS."""
    arn = f"arn:{partition}:s3:::{bucket}"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "TlsOnly",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:*",
                "Resource": [arn, f"{arn}/*"],
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            }
        ],
    }


def put(cloud: Cloud, bucket: str, key: str, content: bytes) -> None:
    """Put an object, unless it is there already."""
    s3 = cloud.client("s3")
    with told(f"putting s3://{bucket}/{key}"):
        try:
            if s3.head_object(Bucket=bucket, Key=key, **_owner(cloud))["ContentLength"] == len(content):
                return
        except ClientError as error:
            if not _is_missing(error):
                raise
        s3.put_object(Bucket=bucket, Key=key, Body=content, **_owner(cloud))


def is_gone(cloud: Cloud, bucket: str, key: str) -> bool:
    """Whether an object is certainly not there; one that may not be looked at counts as there."""
    with told(f"looking at s3://{bucket}/{key}"):
        try:
            cloud.client("s3").head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] == "403":
                return False
            if not _is_missing(error):
                raise
            return True
    return False


def delete_bucket(cloud: Cloud, bucket: str) -> bool:
    """Delete the bucket with all versions of what deployments put into it; whether there was one.

    Raises:
        DeploymentError: it holds something else, or may not be deleted.
    """
    s3 = cloud.client("s3")
    with told(f"deleting the bucket {bucket}"):
        try:
            pages = s3.get_paginator("list_object_versions").paginate(Bucket=bucket, **_owner(cloud))
            found = [one for page in pages for kind in ("Versions", "DeleteMarkers") for one in page.get(kind, [])]
        except ClientError as error:
            if _is_missing(error):
                return False
            raise
        others = [one["Key"] for one in found if not one["Key"].startswith((f"{PREFIX}/", f"{FUNCTIONS}/"))]
        if others:
            raise DeploymentError(f"the bucket {bucket} holds {others[0]}, which no deployment put there: it is kept")
        for one in found:
            s3.delete_object(Bucket=bucket, Key=one["Key"], VersionId=one["VersionId"])
        s3.delete_bucket(Bucket=bucket)
    return True


def _is_missing(error: ClientError) -> bool:
    return error.response["Error"]["Code"] in ("404", "NoSuchBucket", "NoSuchKey", "NotFound")


def has_module(folder: Path, name: str) -> bool:
    """Whether a folder may hold a module or package of this name, wherever it keeps its code."""
    return any(name in {part.removesuffix(".py") for part in path.split("/")} for path, _ in _files(folder))


def _owner(cloud: Cloud) -> dict[str, Any]:
    """A bucket of this name that belongs to somebody else gets nothing of ours."""
    return {} if cloud.endpoint else {"ExpectedBucketOwner": cloud.account}


def _own() -> Iterator[tuple[str, Path]]:
    for name in PARTS:
        yield name, ROOT / name
    for name in SCRIPTS:
        yield f"scripts/{name}", ROOT / "scripts" / name
    for folder in FOLDERS:
        for name, path in _files(ROOT / folder):
            yield f"{folder}/{name}", path


def _copy(folder: Path, files: Iterable[tuple[str, Path]]) -> None:
    """Copy files below a folder: a build leaves traces."""
    for name, path in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def _is_locked(project: Path) -> bool:
    """Whether a project names the hash of each thing that it installs: ours would have none."""
    path = project / "requirements.txt"
    return not (project / "pyproject.toml").exists() and path.is_file() and "--hash=" in path.read_text("utf-8")


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not is_skipped(parts):
            yield "/".join(parts), path
