"""The zip of the Lambda code: the same bytes for the same input, nothing of this machine in it, and clear errors."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from deployment import package as packaging  # noqa: E402 - scripts are found by their folder
from deployment.package import Package, build, download_wheels, upload  # noqa: E402

from tests.docs.test_install import SECRETS, skipped  # noqa: E402
from thunderagent.model.errors import AccessDenied, ConfigurationError, StoreError  # noqa: E402

Install = Callable[[Path], None]


def wheels(**files: str) -> Install:
    """Dependencies as pip leaves them in a folder."""

    def install(folder: Path) -> None:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    return install


def names(package: Package) -> list[str]:
    with zipfile.ZipFile(package.path) as archive:
        return archive.namelist()


def test_the_same_input_gives_the_same_bytes_whatever_the_time_and_the_mode_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    (folder / "jobs").mkdir(parents=True)
    (folder / "lambda_function.py").write_text("handler = None\n")
    (folder / "jobs" / "__init__.py").write_text("")
    first = build(tmp_path / "first.zip", local=True, extra=[folder])
    for path in folder.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    second = build(tmp_path / "second.zip", local=True, extra=[folder])
    assert first.path.read_bytes() == second.path.read_bytes()
    assert (first.key, first.digest) == (second.key, second.digest)
    assert names(first) == sorted(names(first))

    (folder / "lambda_function.py").write_text("handler = 1\n")
    third = build(tmp_path / "third.zip", local=True, extra=[folder])
    assert third.key != first.key
    (folder / "lambda_function.py").rename(folder / "lambda_handler.py")
    assert build(tmp_path / "fourth.zip", local=True, extra=[folder]).key != third.key


def test_the_local_zip_has_our_code_with_its_data_and_nothing_else(tmp_path: Path) -> None:
    package = build(tmp_path / "lambda.zip", local=True)
    found = names(package)
    assert {name.partition("/")[0] for name in found} == {"thunderagent"}
    assert {"thunderagent/__init__.py", "thunderagent/py.typed"} <= set(found)
    assert not [name for name in found if "__pycache__" in name or name.endswith(".pyc")]
    assert package.files == len(found)
    assert package.packed == package.path.stat().st_size < package.unpacked
    assert str(package).startswith(f"{package.files} files, ")


def test_what_pip_notes_of_this_machine_is_left_out_and_the_rest_of_a_dependency_is_not(tmp_path: Path) -> None:
    install = wheels(
        **{
            "dep/__init__.py": "",
            "dep/bin/tool.py": "",
            "dep/__pycache__/x.cpython-312.pyc": "",
            "dep-1.0.dist-info/METADATA": "Name: dep",
            "dep-1.0.dist-info/RECORD": "",
            "dep-1.0.dist-info/direct_url.json": "",
            "bin/dep": "#!/home/me/.venv/bin/python",
        },
    )
    found = names(build(tmp_path / "lambda.zip", install=install))
    assert {"dep/__init__.py", "dep/bin/tool.py", "dep-1.0.dist-info/METADATA"} <= set(found)
    assert not [name for name in found if name.endswith((".pyc", "RECORD", "direct_url.json")) or name[:4] == "bin/"]


def test_secrets_of_a_folder_with_more_code_are_left_out(tmp_path: Path) -> None:
    for name in ("shop_events.py", *SECRETS, *skipped()):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("x")
    found = names(build(tmp_path / "lambda.zip", local=True, extra=[tmp_path / "mine"]))
    assert [name for name in found if not name.startswith("thunderagent/")] == ["shop_events.py"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"architecture": "mips"}, "the architecture is 'mips'; Lambda has x86_64 and arm64"),
        ({"python": "2.7"}, "the Python is '2.7'; write one of 3.11, 3.12, 3.13"),
        ({"local": True, "extra": [Path("/nowhere")]}, "there is no folder /nowhere"),
    ],
)
def test_arguments_that_cannot_work_are_told(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        build(tmp_path / "lambda.zip", **arguments)
    assert not list(tmp_path.iterdir())


def test_two_files_that_want_one_name_are_told_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "mine" / "thunderagent").mkdir(parents=True)
    (tmp_path / "mine" / "thunderagent" / "__init__.py").write_text("")
    with pytest.raises(ConfigurationError, match=r"thunderagent/__init__\.py and .*mine/thunderagent/__init__\.py"):
        build(tmp_path / "lambda.zip", local=True, extra=[tmp_path / "mine"])


def test_code_over_the_limit_of_lambda_is_refused_with_the_largest_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaging, "MOST_UNPACKED", 3_000_000)
    output = tmp_path / "lambda.zip"
    output.write_text("the last one")
    with pytest.raises(ConfigurationError, match=r"Lambda takes 3 MB unpacked; the largest are big 4 MB, thunderagent"):
        build(output, install=wheels(**{"big/data.bin": "x" * 4_000_000}))
    assert output.read_text() == "the last one"
    assert list(tmp_path.iterdir()) == [output]


def test_pip_is_asked_for_wheels_of_lambda_in_the_versions_that_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    build(tmp_path / "lambda.zip", architecture="arm64", python="3.12")
    assert "--only-binary=:all:" in asked
    assert asked[asked.index("--python-version") + 1] == "3.12"
    platforms = [one.partition("=")[2] for one in asked if one.startswith("--platform=")]
    assert platforms[0] == "manylinux_2_34_aarch64"
    assert {"manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(platforms)
    assert any(one.startswith("PyJWT[crypto]") for one in asked)
    assert any(one.startswith("pydantic>=") for one in asked)
    assert not any(one.startswith(("ministack", "pytest")) for one in asked)
    assert asked[asked.index("--constraint") + 1] == str(ROOT / "constraints.txt")


@pytest.mark.parametrize("fails", [True, False])
def test_a_pip_that_fails_or_does_not_end_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if fails:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for pydantic\n")
        raise subprocess.TimeoutExpired(command, 600)

    monkeypatch.setattr(subprocess, "run", run)
    told = "No matching distribution found for pydantic" if fails else "did not end within 600 s"
    with pytest.raises(ConfigurationError, match=told):
        build(tmp_path / "lambda.zip")
    assert not list(tmp_path.iterdir())


def test_a_python_without_pip_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="python -m ensurepip"):
        build(tmp_path / "lambda.zip")


# The wheels of machines

BACKEND: Final = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "shop-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for file, text in FILES.items():
            wheel.writestr(zipfile.ZipInfo(file), text)
    return name
"""


def wheel_files(name: str, *needs: str) -> dict[str, str]:
    """What a wheel of version 1 holds."""
    told = "".join(f"Requires-Dist: {one}\n" for one in needs)
    return {
        f"{name}.py": "",
        f"{name}-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{told}",
        f"{name}-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-1.dist-info/RECORD": "",
    }


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that pip may take: one wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "dep-1-py3-none-any.whl", "w") as wheel:
        for file, text in wheel_files("dep").items():
            wheel.writestr(file, text)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return folder


def project(folder: Path, *needs: str) -> Path:
    """A project that builds itself, so that no tool of an index is needed."""
    folder.mkdir(exist_ok=True)
    (folder / "backend.py").write_text(f"FILES = {wheel_files('shop', *needs)!r}\n{BACKEND}")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    return folder


def downloaded(tmp_path: Path, pins: str, *needs: str) -> list[str]:
    """The wheels that machines get of a project with these needs."""
    (tmp_path / "constraints.txt").write_text(pins)
    made, source = tmp_path / "wheels", project(tmp_path / "shop", *needs)
    download_wheels(made, [(source, "")], tmp_path / "constraints.txt", architecture="arm64", python="3.11")
    return sorted(path.name for path in made.iterdir())


@pytest.mark.usefixtures("index")
def test_machines_get_a_project_and_what_it_needs_as_wheels(tmp_path: Path) -> None:
    assert downloaded(tmp_path, "", "dep") == ["dep-1-py3-none-any.whl", "shop-1-py3-none-any.whl"]


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("pins", "need", "words"),
    [
        ("", "gone", "pip wheel --no-deps gone, and name its folder here with PIP_FIND_LINKS"),
        ("dep==2\n", "dep==1", "Versions of your own belong into constraints.txt in the folder of your project"),
    ],
)
def test_a_need_that_has_no_wheel_or_does_not_fit_is_told_with_the_remedy(
    tmp_path: Path, pins: str, need: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as failed:
        downloaded(tmp_path, pins, need)
    assert "pip found no wheels for Python 3.11 on arm64" in str(failed.value)


@pytest.mark.parametrize(
    ("architecture", "types"),
    [
        ("arm64", ("a1.large", "t4g.small", "m7gd.large", "c7gn.large", "im4gn.large", "g5g.xlarge")),
        ("x86_64", ("t3.small", "g4dn.xlarge", "gr6.4xlarge", "m7i-flex.large", "i4i.large", "u-6tb1.metal")),
    ],
)
def test_the_type_of_a_machine_names_its_processor(architecture: str, types: tuple[str, ...]) -> None:
    assert {name: packaging.processor(name) for name in types} == dict.fromkeys(types, architecture)


def test_all_that_is_installed_on_machines_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = [text for name, text in config["options.extras_require"].items() if name not in ("dev", "docs", "local")]
    todo = [
        Requirement(line)
        for text in (config["options"]["install_requires"], *extras)
        for line in text.split("\n")
        if line
    ]
    seen: set[str] = set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        assert one.specifier.contains(pins[name], prereleases=True), one
        if str(one) in seen:
            continue
        seen.add(str(one))
        needs = [Requirement(text) for text in metadata.requires(name) or []]
        wanted = ({"extra": extra} for extra in ("", *one.extras))
        todo += [need for extra in wanted for need in needs if need.marker is None or need.marker.evaluate(extra)]


# The bucket


class Bucket:
    """S3 that counts what is put."""

    def __init__(self) -> None:
        self.s3 = boto3.client("s3", region_name="eu-central-1", aws_access_key_id="x", aws_secret_access_key="x")
        self.puts = 0

    def head_object(self, **arguments: Any) -> Any:
        return self.s3.head_object(**arguments)

    def put_object(self, **arguments: Any) -> Any:
        self.puts += 1
        return self.s3.put_object(**arguments)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with mock_aws():
        one = Bucket()
        one.s3.create_bucket(Bucket="artefacts", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
        yield one


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return build(tmp_path / "lambda.zip", local=True)


def test_the_zip_is_put_under_the_hash_of_its_content_and_only_once(bucket: Bucket, package: Package) -> None:
    key = upload(package, "artefacts", bucket)
    assert key == package.key
    assert key.startswith("thunderagent/lambda/")
    assert key.endswith(".zip")
    assert package.digest[:32] in key
    assert bucket.s3.get_object(Bucket="artefacts", Key=key)["Body"].read() == package.path.read_bytes()
    assert upload(package, "artefacts", bucket) == key
    assert bucket.puts == 1


def test_a_bucket_of_this_name_that_belongs_to_somebody_else_gets_nothing(package: Package) -> None:
    asked: list[dict[str, Any]] = []

    class Elsewhere:
        def head_object(self, **arguments: Any) -> Any:
            asked.append(arguments)
            raise ClientError({"Error": {"Code": "403", "Message": "no"}}, "HeadObject")

    with pytest.raises(AccessDenied, match="does the bucket belong to the account 123456789012"):
        upload(package, "mine", Elsewhere(), owner="123456789012")
    assert [one["ExpectedBucketOwner"] for one in asked] == ["123456789012"]


def test_a_bucket_that_does_not_exist_is_told_with_the_command_that_makes_it(bucket: Bucket, package: Package) -> None:
    with pytest.raises(ConfigurationError, match="there is no bucket 'nowhere'; make it with: aws s3 mb s3://nowhere"):
        upload(package, "nowhere", bucket)


@pytest.mark.parametrize("action", ["HeadObject", "PutObject"])
def test_a_missing_permission_is_told_with_the_permissions_that_are_needed(package: Package, action: str) -> None:
    class Closed:
        def head_object(self, **_: Any) -> Any:
            code = "403" if action == "HeadObject" else "404"
            raise ClientError({"Error": {"Code": code, "Message": "no"}}, "HeadObject")

        def put_object(self, **_: Any) -> Any:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, action)

    with pytest.raises(AccessDenied, match=r"allow s3:PutObject .*arn:aws:s3:::mine/thunderagent/lambda/\*"):
        upload(package, "mine", Closed())


def test_an_s3_that_does_not_answer_is_told(package: Package) -> None:
    class Away:
        def head_object(self, **_: Any) -> Any:
            raise EndpointConnectionError(endpoint_url="https://s3")

    with pytest.raises(StoreError, match="cannot be put to s3://mine/thunderagent/lambda/"):
        upload(package, "mine", Away())


def test_the_command_says_where_the_zip_is_and_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packaging.main(["--local", "--output", str(tmp_path / "lambda.zip")]) == 0
    assert "lambda.zip: " in capsys.readouterr().out
    assert packaging.main(["--local", "--output", str(tmp_path / "lambda.zip"), "--extra", "/nowhere"]) == 1
    assert capsys.readouterr().err == (
        "error: there is no folder /nowhere, whose files are to go into the Lambda code\n"
    )
