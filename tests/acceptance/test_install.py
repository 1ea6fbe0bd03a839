"""`scripts/install-ec2` for real, in a minimal Debian that debootstrap makes: installed twice, started, used, stopped.

Opt-in with `THUNDER_TEST_INSTALL=1`, as root, with debootstrap. It downloads a Debian, and the wheels that
`scripts/deploy` gives to machines; pip inside has no index. Everything it starts ends with a namespace of its own, and
its mounts with it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from deployment.artefacts import make_wheels  # noqa: E402 - scripts are found by their folder

SKIPPED = (".git", ".venv", "demo-output", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
LONG_S = 900
ARCHITECTURE = "arm64" if platform.machine() == "aarch64" else "x86_64"
INSTALL = "/root/project/scripts/install-ec2 --wheels /root/wheels --python 3.11"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.environ.get("THUNDER_TEST_INSTALL") != "1", reason="set THUNDER_TEST_INSTALL=1 to run it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a chroot needs root"),
    pytest.mark.skipif(not shutil.which("debootstrap"), reason="debootstrap is missing: apt-get install debootstrap"),
]

INSIDE = """
root=$1
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
exec chroot "$root" bash -euc "$2"
"""

AGENTS = r"""
# As systemd would: the folder of the unit, its user, its environment, its command.
unit=/etc/systemd/system/thunderagent.service
install -d -o thunderagent -g thunderagent -m 0755 /run/thunderagent
command=$(sed -n 's/^ExecStart=//p' $unit)
environment=/opt/thunderagent/current/with-environment
$environment sh -c "umask 027; exec $command" >/tmp/supervisord.out 2>&1 &
supervisord=$!
trap 'kill $supervisord 2>/dev/null; cat /tmp/supervisord.out /var/log/thunderagent/*.log >&2' ERR
for try in $(seq 60); do
    $environment /opt/thunderagent/current/rolling-restart --check >/dev/null 2>&1 && break
    sleep 1
done
$environment /opt/thunderagent/current/rolling-restart --check
echo "user: $(stat -c %U /proc/$supervisord)"
setpriv --reuid=nobody --regid=nogroup --clear-groups cat /opt/thunderagent/current/app/jobs/files.py >/dev/null 2>&1 ||
    echo "others: nothing"

# A task, through the command line that was installed.
csv=$(find / -path '*/vega_datasets/_data/seattle-weather.csv' -print -quit 2>/dev/null)
payload="{\"source\": \"$csv\", \"folder\": \"/var/lib/thunderagent/weather\"}"
/usr/local/bin/thunderagent enqueue weather.import "$payload" --task-id first --wait 60 >/dev/null
/usr/local/bin/thunderagent show first --json | grep '"status"'
echo "months: $(ls /var/lib/thunderagent/weather | wc -l)"

# A new version, while the agents of the old one run: they are restarted one after the other.
before=$(readlink /opt/thunderagent/current)
echo '# another version' >>/root/project/jobs/files.py
INSTALL >/dev/null
[ "$(readlink /opt/thunderagent/current)" != "$before" ]
$environment /opt/thunderagent/current/rolling-restart
for pid in $(pgrep -u thunderagent -f 'bin/thunderagent run'); do
    tr '\0' ' ' </proc/$pid/cmdline | grep -o 'releases/[0-9a-f]\+' | sort -u
done | sort -u | sed 's/^/runs: /'
echo "current: $(readlink /opt/thunderagent/current)"
/usr/local/bin/thunderagent enqueue weather.import "$payload" --task-id second --wait 60 >/dev/null
/usr/local/bin/thunderagent show second --json | grep '"status"'

kill -TERM $supervisord
wait $supervisord && echo "supervisord: 0" || echo "supervisord: $?"
grep -c 'agent stopped' /var/log/thunderagent/agent-0.log /var/log/thunderagent/agent-1.log
"""


class Debian:
    """A minimal system below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=procps", "bookworm", root],
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert made.returncode == 0, made.stdout[-3000:]
        shutil.copytree(ROOT, root / "root/project", ignore=shutil.ignore_patterns(*SKIPPED))
        make_wheels(root / "root/wheels", None, architecture=ARCHITECTURE, python="3.11")
        self.environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "PIP_INDEX_URL": "http://127.0.0.1:1",
        }

    def run(self, script: str) -> str:
        """What a script says inside; whatever it started ends with it."""
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", INSIDE, "-", self.root, script],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def tree(self, *folders: str) -> dict[str, tuple[int, int, int]]:
        """What is below these folders, to see whether something changes."""
        found = (path for folder in folders for path in (self.root / folder).rglob("*"))
        stats = {str(path): path.lstat() for path in found}
        return {path: (stat.st_mode, stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.fixture
def debian() -> Iterator[Debian]:
    folder = Path(tempfile.mkdtemp(prefix="thunderagent-install-", dir="/var/tmp"))
    folder.chmod(0o755)  # other users than root live in it
    try:
        yield Debian(folder)
    finally:
        shutil.rmtree(folder)


def verify(root: Path, name: str) -> str:
    """What systemd finds wrong with an installed unit. A minimal system has no units that ours could refer to."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={root}", name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def test_it_installs_into_a_clean_debian_and_the_agents_there_run_a_task(debian: Debian) -> None:
    first = debian.run(INSTALL)
    assert "make the user thunderagent" in first
    assert "jobs: report.build" in first
    before = debian.tree("opt", "etc", "usr", "var/lib/thunderagent", "var/log/thunderagent")
    second = debian.run(f"{INSTALL} && {INSTALL} --dry-run")
    assert second.count("nothing to do: the release") == 2
    assert "would:" not in second
    assert debian.tree("opt", "etc", "usr", "var/lib/thunderagent", "var/log/thunderagent") == before
    assert (debian.root / "etc/thunderagent/environment").stat().st_mode & 0o777 == 0o640

    if shutil.which("systemd-analyze"):
        shutil.copytree("/usr/lib/systemd/system", debian.root / "usr/lib/systemd/system", dirs_exist_ok=True)
        assert verify(debian.root, "thunderagent.service") == ""
        assert verify(debian.root, "thunderagent@1.service") == ""

    said = debian.run(AGENTS.replace("INSTALL", INSTALL)).splitlines()
    assert "user: thunderagent" in said
    assert "others: nothing" in said
    assert "months: 48" in said
    assert sum('"status": "SUCCESS"' in line for line in said) == 2
    [current] = [line.removeprefix("current: ") for line in said if line.startswith("current: ")]
    assert [line.removeprefix("runs: ") for line in said if line.startswith("runs: ")] == [current]
    assert "supervisord: 0" in said
    stopped = [line for line in said if line.startswith("/var/log/thunderagent/agent-")]
    assert [line.partition(":")[2] for line in stopped] == ["2", "2"], "each drained at the restart and at the end"
