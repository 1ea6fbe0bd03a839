"""`infra/Dockerfile` for real: Buildah builds it from a minimal Debian, and it runs as it says of itself in namespaces.

Opt-in with `THUNDER_TEST_INSTALL=1`, as root, with debootstrap and Buildah. It downloads a Debian, tini and what pip
installs. The Debian stands for the official image of Python, which is the one difference. Everything that it starts
ends with a namespace, and the images with the folder of their storage.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.processes import LONG_S, Log, until
from tests.acceptance.test_install import LONG_S as BUILD_S
from tests.acceptance.test_install import ROOT, SKIPPED

SYSTEM: Final = "python3,python3-pip,python3-venv"
BASE: Final = "localhost/python-of-debian:test"
SECRETS: Final = (".env", "deep/down/.env.production", "jobs/key.pem", "tasks.db")
ORPHANS: Final = '''
"""A job that leaves a process behind, which ends later."""

import subprocess

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job


class Nothing(BaseModel):
    """Nothing to say."""


@job("orphans.leave")
def leave(ctx: Context, payload: Nothing) -> None:
    subprocess.run(["sh", "-c", "sleep 0.2 & exit"], check=True)
'''

ENGINE: Final = """
root=$1 data=$2 user=$3
shift 3
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$data" "$root/data"
for volume in $VOLUMES; do
    mount -t tmpfs -o "$(stat -c uid=%u,gid=%g,mode=%a "$root$volume")" tmpfs "$root$volume"
done
mount -o remount,ro,bind "$root"
exec setpriv --no-new-privs --bounding-set=-all,+sys_chroot,+setuid,+setgid chroot --userspec="$user" "$root" "$@"
"""
"""What a container engine does in new namespaces: a read-only root, and volumes with the owner that the image says."""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.environ.get("THUNDER_TEST_INSTALL") != "1", reason="set THUNDER_TEST_INSTALL=1 to run it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a chroot needs root"),
    *(
        pytest.mark.skipif(not shutil.which(tool), reason=f"{tool} is missing: apt-get install {tool}")
        for tool in ("buildah", "debootstrap")
    ),
]


def run(*command: str | Path, **environment: str) -> str:
    """What a command says."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@dataclass(slots=True)
class Image:
    """A built image, mounted."""

    root: Path
    config: dict[str, Any]

    @property
    def environment(self) -> list[str]:
        return list(self.config["Env"])

    def command(self, *arguments: str, **settings: str) -> list[str]:
        """The command of a container: in its folder, with its environment and nothing of ours."""
        given = [f"THUNDERAGENT_{name}={value}" for name, value in settings.items()]
        return ["env", "-i", "-C", self.config["WorkingDir"], *self.environment, *given, *arguments]


@dataclass(slots=True)
class Container:
    """A running container of the image."""

    image: Image
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    log: Log = field(init=False)

    @property
    def settings(self) -> dict[str, str]:
        return {"STORE": "sqlite:////data/tasks.db", "POLL_MIN_S": "0.2"}

    def __enter__(self) -> Container:
        config, data = self.image.config, self.folder / "data"
        data.mkdir()
        os.chown(data, *map(int, config["User"].split(":")))
        (self.image.root / "data").mkdir(exist_ok=True)
        self.log = Log(self.folder / "log")
        command = self.image.command(*config["Entrypoint"], *config["Cmd"], **self.settings)
        namespaces = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
        with self.log.path.open("wb") as output:
            self.process = subprocess.Popen(
                [*namespaces, "bash", "-euc", ENGINE, "-", self.image.root, data, config["User"], *command],
                env={**os.environ, "VOLUMES": " ".join(config["Volumes"])},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)

    def line(self, message: str) -> dict[str, Any]:
        """A line of its log, waited for."""

        def look() -> list[dict[str, Any]]:
            assert self.process.poll() is None or self.log.lines(message), self.log.tail
            return self.log.lines(message)

        return until(look, LONG_S, lambda: f"{message!r}\n{self.log.tail}")[0]

    @property
    def init(self) -> int:
        """Process 1, as it is called outside."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def inside(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as `docker exec` does."""
        user, root = f"--userspec={self.image.config['User']}", str(self.image.root)
        enter = ["nsenter", f"--target={self.init}", "--mount", "--pid", "--uts", "chroot", user, root]
        return subprocess.run(
            [*enter, *self.image.command(*arguments, **self.settings)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    folder = Path(tempfile.mkdtemp(prefix="thunderagent-image-", dir="/var/tmp"))
    folder.chmod(0o755)
    storage = ("buildah", "--root", folder / "storage", "--runroot", folder / "run")
    try:
        base = folder / "base"
        run("debootstrap", "--variant=minbase", f"--include={SYSTEM}", "bookworm", base)
        if certificates := os.environ.get("PIP_CERT"):  # of the index that this machine uses
            shutil.copy(certificates, base / "etc/pip.crt")
            (base / "etc/pip.conf").write_text("[global]\ncert = /etc/pip.crt\ntimeout = 180\n")
        container = run(*storage, "from", "scratch").strip()
        run(*storage, "add", "--quiet", container, base, "/")
        run(*storage, "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
        run(*storage, "commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(base)
        project = folder / "project"
        shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(*SKIPPED))
        (project / "jobs/orphans.py").write_text(ORPHANS)
        for name in SECRETS:
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text("secret")
        build = ("build", "--pull-never", "--isolation", "chroot", "--format", "docker", "--tag", "thunderagent")
        options = ("--build-arg", f"BASE={BASE}", "--build-arg", "EXTRAS=demo")
        run(*storage, *build, *options, "--file", project / "infra/Dockerfile", project)
        told = json.loads(run(*storage, "inspect", "--type", "image", "thunderagent"))["Docker"]["config"]
        container = run(*storage, "from", "--pull-never", "thunderagent").strip()
        yield Image(Path(run(*storage, "mount", container).strip()), told)
        run(*storage, "umount", container)
    finally:
        shutil.rmtree(folder)


def test_the_image_has_the_project_without_its_secrets_and_nothing_that_a_job_may_change(image: Image) -> None:
    assert (image.root / "app/jobs/orphans.py").exists()
    assert [name for name in SECRETS if (image.root / "app" / name).exists()] == []
    assert not (image.root / "opt/venv/bin/pip").exists()
    user = int(image.config["User"].partition(":")[0])
    found = [path for top in ("app", "opt") for path in (image.root / top).rglob("*") if not path.is_symlink()]
    assert [path for path in found if path.stat().st_uid == user or path.stat().st_mode & 0o002] == []


def test_what_is_installed_has_the_versions_of_the_constraints(image: Image) -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    installed = {
        name.lower().replace("_", "-"): version.removesuffix(".dist-info")
        for path in image.root.glob("opt/venv/lib/python3*/site-packages/*.dist-info")
        for name, _, version in [path.name.partition("-")]
    }
    assert installed.keys() >= {"boto3", "websockets"}
    del installed["thunderagent"]
    assert installed == {name: pinned.get(name) for name in installed}


def test_a_read_only_container_works_is_alive_reaps_orphans_and_drains_on_its_stop_signal(
    image: Image, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    with Container(image, tmp_path) as container:
        assert container.line("agent started")["agent"].split(":")[1] != "1"
        asked = container.inside("thunderagent", "enqueue", "orphans.leave", "{}", "--task-id", "a", "--wait", "30")
        assert asked.returncode == 0, asked.stderr
        check = image.config["Healthcheck"]["Test"]
        assert check[0] == "CMD"
        until(lambda: container.inside(*check[1:]).returncode == 0, LONG_S, "an agent that lives")
        states = "cat /proc/[0-9]*/stat"
        until(lambda: ") Z " not in container.inside("sh", "-c", states).stdout, LONG_S, "no zombie")
        for path in ("/app/x", "/opt/venv/x", "/etc/x"):
            assert "Read-only file system" in container.inside("touch", path).stderr
        status = Path(f"/proc/{container.init}/status").read_text()
        assert f"Uid:\t{image.config['User'].partition(':')[0]}\t" in status
        assert "NoNewPrivs:\t1" in status
        os.kill(container.init, signal.Signals[image.config["StopSignal"]])
        assert container.process.wait(60) == 0, container.log.tail
        assert container.log.lines("agent stopped")
