"""`scripts/install-ec2` and its companions on a machine that is made up: a root folder, and programs that note calls.

`tests/acceptance/test_install.py` does the same for real.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("install-ec2", "rolling-restart", "with-environment", "setup-venv", "demo", "test", "bench", "docs")

TOOLS = (
    *("awk", "basename", "bash", "cat", "chmod", "cmp", "cp", "cut", "dirname", "env", "find", "grep", "ln", "mkdir"),
    *("mv", "readlink", "rm", "sed", "sh", "sha256sum", "sleep", "sort", "tail", "tar", "touch", "tr", "xargs"),
)
"""All that the scripts need of a system beside what is made up here."""

NOTE = '#!/bin/bash\necho "$(basename "$0") $*" >>"$STUBS/calls"\n'

SECRETS = (
    ".env",
    ".env.production",
    "prod.env",
    "shop/tls.key",
    "shop/key.pem",
    ".ssh/id_rsa",
    "id_ed25519",
    ".npmrc",
    "main.tfstate",
)


def skipped() -> list[str]:
    """A name for each pattern of what is no part of a project."""
    lines = (ROOT / "scripts" / "skipped").read_text().splitlines()
    return [f"other/{line.replace('*', 'x')}" for line in lines if not line.startswith("#")]


STUBS = {
    "id": "case $1 in -u) echo 0 ;; *) echo root ;; esac",
    "getent": '[ -e "$STUBS/user" ] || [ -n "$USER_IS_THERE" ]',
    "useradd": 'touch "$STUBS/user"',
    "chown": "",
    "setpriv": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "install": 'args=(); while [ $# -gt 0 ]; do case $1 in -o | -g) shift ;; *) args+=("$1") ;; esac; shift; done\n'
    'exec /usr/bin/install "${args[@]}"',
    "apt-get": 'cp "$STUBS/later/python3.11" "$STUBS/bin/"',
    "apt-cache": "echo '  Candidate: 3.11.2-1+b1'",
    "systemctl": """
wants=$INSTALL_ROOT/etc/systemd/system/multi-user.target.wants
case $1 in
    is-active) [ -e "$STUBS/active" ] ;;
    start | restart) touch "$STUBS/active" ;;
    enable) mkdir -p "$wants" && ln -s "/etc/systemd/system/$3" "$wants/" ;;
esac""",
    "supervisorctl": """
while [[ $1 == -* ]]; do shift 2; done
agent=${2#agent:}
case $1 in
    status) for one in agent-0 agent-1; do echo "agent:$one   RUNNING   pid 1, uptime 0:00:10"; done ;;
    pid) cat "$STUBS/pid-$agent" 2>/dev/null || echo 100 ;;
    restart)
        [ ! -e "$STUBS/broken-$agent" ] || { echo "$agent: ERROR (spawn error)"; exit 1; }
        echo $(($(cat "$STUBS/pid-$agent" 2>/dev/null || echo 100) + 1)) >"$STUBS/pid-$agent" ;;
esac""",
}

PYTHON = """
case "$*" in
    *ensurepip*) echo "$STUBS/bin/python3.11" ;;
    "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip"*)
        [ ! -e "$STUBS/pip-fails" ] || { echo "No matching distribution" >&2; exit 1; }
        for one in thunderagent supervisord; do printf '#!/bin/sh\\n' >"$(dirname "$0")/$one"; done
        chmod +x "$(dirname "$0")"/* ;;
    *Registry*)
        [ ! -e "$STUBS/jobs-are-broken" ] || { echo "ModuleNotFoundError: No module named 'pandas'" >&2; exit 1; }
        echo "jobs: a" ;;
esac"""


class Machine:
    """A root folder, and the programs that the script calls."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.stubs = folder / "stubs"
        self.source = folder / "shop"
        for path in (self.root, self.stubs / "bin", self.stubs / "later", self.source / "shop"):
            path.mkdir(parents=True)
        (self.source / "pyproject.toml").write_text("[project]\nname = 'shop'\n")
        (self.source / "shop" / "jobs.py").write_text("VERSION = 1\n")
        for name in TOOLS:
            (self.stubs / "bin" / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
        for name, text in STUBS.items():
            self.stub(f"bin/{name}", text)
        self.stub("bin/python3.11", PYTHON)

    def stub(self, name: str, text: str) -> None:
        (self.stubs / name).write_text(f"{NOTE}{text}\n")
        (self.stubs / name).chmod(0o755)

    def run(self, *arguments: str, code: int = 0, script: str = "install-ec2") -> str:
        """What the script says."""
        done = subprocess.run(
            [ROOT / "scripts" / script, *arguments],
            env={
                "PATH": f"{self.stubs}/bin",
                "INSTALL_ROOT": str(self.root),
                "STUBS": str(self.stubs),
                "USER_IS_THERE": "",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        return said

    def install(self, *arguments: str, code: int = 0) -> str:
        return self.run("--source", str(self.source), "--jobs", "shop.jobs", *arguments, code=code)

    def calls(self, name: str) -> list[str]:
        """The arguments of every call of a program since the last look."""
        path = self.stubs / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]

    def forget(self) -> None:
        (self.stubs / "calls").unlink(missing_ok=True)

    def boots(self) -> None:
        """Systemd runs from now on, and supervisord has its socket."""
        (self.root / "run/systemd/system").mkdir(parents=True)
        (self.root / "run/thunderagent/health").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(self.root / "run/thunderagent/supervisor.sock"))
        for pid in range(100, 120):
            (self.root / f"run/thunderagent/health/{pid}.json").write_text('{\n  "healthy": true\n}\n')

    def read(self, path: str) -> str:
        return (self.root / path).read_text()

    @property
    def release(self) -> str:
        return os.readlink(self.root / "opt/thunderagent/current")

    def tree(self) -> dict[str, object]:
        """Everything below the root, for the question whether anything changed."""
        return {
            str(path.relative_to(self.root)): (path.lstat().st_mtime_ns, path.lstat().st_mode, path.lstat().st_ino)
            for path in sorted(self.root.rglob("*"))
        }


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="ta-") as folder:  # the address of a socket must be short
        yield Machine(Path(folder))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_are_free_of_what_shellcheck_finds(script: str) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not on this machine: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", "-x", ROOT / "scripts" / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_help_names_every_option_and_an_example(machine: Machine) -> None:
    said = machine.run("--help")
    for option in ("source", "package", "extras", "constraints", "wheels", "python", "jobs"):
        assert f"--{option}" in said
    for option in ("processes", "store", "no-start", "rollback", "dry-run"):
        assert f"--{option}" in said
    assert "Example: sudo scripts/install-ec2" in said
    assert "--dry-run" in machine.run("--help", script="rolling-restart")


def test_a_dry_run_says_everything_and_changes_nothing(machine: Machine) -> None:
    said = machine.install("--dry-run").splitlines()
    assert machine.tree() == {}
    assert machine.calls("useradd") == machine.calls("systemctl") == []
    done = machine.install().splitlines()
    expected = [line.removeprefix("would: ") for line in said]
    assert [line for line in done if not line.startswith("jobs:")] == expected, "what is done is what was announced"


def test_the_second_run_changes_nothing_and_says_so(machine: Machine) -> None:
    machine.boots()
    machine.install()
    before = machine.tree()
    machine.forget()
    said = machine.install()
    assert said == f"nothing to do: the release {Path(machine.release).name} is installed and in use\n"
    assert machine.tree() == before
    assert machine.calls("useradd") == machine.calls("apt-get") == []
    assert {call.split()[0] for call in machine.calls("systemctl")} == {"is-active"}
    assert "nothing to do" in machine.install("--dry-run")


def test_it_installs_everything_that_the_units_expect(machine: Machine) -> None:
    machine.install("--store", "dynamodb://Shop?region=eu-central-1&endpoint=http://127.0.0.1:1", "--processes", "4")
    environment = machine.read("etc/thunderagent/environment")
    assert "AGENT_JOBS=shop.jobs\n" in environment
    assert "AGENT_PROCESSES=4\n" in environment
    assert "THUNDERAGENT_STORE=dynamodb://Shop?region=eu-central-1&endpoint=http://127.0.0.1:1\n" in environment
    assert (machine.root / "etc/thunderagent/environment").stat().st_mode & 0o777 == 0o640
    for name in ("thunderagent.service", "thunderagent@.service"):
        assert machine.read(f"etc/systemd/system/{name}") == (ROOT / "systemd" / name).read_text()
    current = machine.root / "opt/thunderagent/current"
    assert (current / "app/shop/jobs.py").read_text() == "VERSION = 1\n"
    assert (current / "systemd/supervisord.conf").is_file()
    assert os.access(current / "rolling-restart", os.X_OK)
    assert machine.root / "var/log/thunderagent" in (machine.root / "var/log").iterdir()
    assert "with-environment thunderagent" in machine.read("usr/local/bin/thunderagent")
    assert machine.calls("systemctl") == ["enable --quiet thunderagent.service"], "systemd does not run in a chroot"


def test_secrets_caches_and_history_are_not_copied(machine: Machine) -> None:
    names = [*SECRETS, *skipped(), ".git/config", "shop/__pycache__/jobs.pyc", "shop/data.csv"]
    for name in names:
        path = machine.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    machine.install()
    app = machine.root / "opt/thunderagent/current/app"
    files = {str(path.relative_to(app)) for path in app.rglob("*") if path.is_file()}
    assert files == {"pyproject.toml", "shop/jobs.py", "shop/data.csv"}


def test_only_root_and_the_agents_may_read_a_release(machine: Machine) -> None:
    (machine.source / "shop" / "run").write_text("#!/bin/sh\n")
    (machine.source / "shop" / "run").chmod(0o755)
    machine.install()
    release = machine.root / "opt/thunderagent" / machine.release
    modes = {str(one.relative_to(release)): one.stat().st_mode & 0o777 for one in (release, *release.rglob("*"))}
    wanted = {"": 0o750, "app/shop": 0o750, "app/shop/jobs.py": 0o640, "app/shop/run": 0o750, "venv/bin/python": 0o750}
    wanted |= {"with-environment": 0o750, "systemd/supervisord.conf": 0o640}
    assert {name: modes[name or "."] for name in wanted} == wanted
    assert f"-hR root:thunderagent {release}" in machine.calls("chown")


def test_releases_of_an_earlier_version_are_closed_to_others_once(machine: Machine) -> None:
    """It copied secrets for all to read, and the release before stays."""
    releases = machine.root / "opt/thunderagent/releases"
    releases.mkdir(parents=True)
    releases.chmod(0o755)
    assert f"would: close {releases} to all but root and thunderagent" in machine.install("--dry-run")
    assert f"close {releases} to all but root and thunderagent\n" in machine.install()
    assert releases.stat().st_mode & 0o777 == 0o750
    assert [call for call in machine.calls("install") if call.endswith(f" {releases}")] == [
        f"-d -m 0750 -o root -g thunderagent {releases}"
    ]
    assert "nothing to do" in machine.install()


def test_it_starts_the_agents_where_systemd_runs(machine: Machine) -> None:
    machine.boots()
    said = machine.install()
    assert "start the agents\n" in said
    calls = [call for call in machine.calls("systemctl") if not call.startswith("is-active")]
    assert calls == ["daemon-reload", "enable --quiet thunderagent.service", "start thunderagent"]


def test_without_start_nothing_is_started_nor_restarted(machine: Machine) -> None:
    machine.boots()
    machine.install("--no-start")
    assert not any(call.startswith(("start", "enable")) for call in machine.calls("systemctl"))
    machine.install()
    (machine.source / "shop" / "jobs.py").write_text("VERSION = 2\n")
    assert "go on with the release before" in machine.install("--no-start")
    assert machine.calls("supervisorctl") == [] or not any("restart" in one for one in machine.calls("supervisorctl"))
    said = machine.install()
    assert said.count("restarting agent:") == 2, "what was put off is done by the next run"


def test_other_code_is_deployed_with_one_agent_restarted_after_the_other(machine: Machine) -> None:
    machine.boots()
    machine.install()
    first = machine.release
    machine.forget()
    (machine.source / "shop" / "jobs.py").write_text("VERSION = 2\n")
    said = machine.install()
    assert machine.release != first
    assert os.readlink(machine.root / "opt/thunderagent/previous") == first
    restarts = [one.split()[-1] for one in machine.calls("supervisorctl") if " restart " in one]
    assert restarts == ["agent:agent-0", "agent:agent-1"]
    assert "agent:agent-0 serves as process 101\nrestarting agent:agent-1 (2 of 2)" in said
    assert not any(call.startswith("restart") for call in machine.calls("systemctl")), "supervisord goes on"
    assert "nothing to do" in machine.install()

    (machine.source / "shop" / "jobs.py").write_text("VERSION = 3\n")
    assert f"take away the old release {Path(first).name}" in machine.install()
    assert len(list((machine.root / "opt/thunderagent/releases").iterdir())) == 2


def test_a_new_agent_that_does_not_start_ends_the_deploy_and_the_next_run_goes_on(machine: Machine) -> None:
    machine.boots()
    machine.install()
    first = machine.release
    (machine.source / "shop" / "jobs.py").write_text("VERSION = 2\n")
    (machine.stubs / "broken-agent-0").touch()
    machine.forget()
    said = machine.install(code=1)
    assert "--rollback" in said
    assert [one.split()[-1] for one in machine.calls("supervisorctl") if " restart " in one] == ["agent:agent-0"]
    (machine.stubs / "broken-agent-0").unlink()
    assert machine.install().count("serves as process") == 2, "the release is there, the restart is not done yet"
    assert f"to {Path(first).name}" in machine.run("--rollback")
    assert machine.release == first


def test_an_agent_that_runs_and_is_not_healthy_ends_the_restart(machine: Machine) -> None:
    machine.boots()
    machine.install()
    (machine.root / "run/thunderagent/health/101.json").write_text('{"healthy": false}')
    environment = [
        "--run",
        str(machine.root / "run/thunderagent"),
        "--health",
        str(machine.root / "run/thunderagent/health"),
    ]
    said = machine.run(*environment, "--wait", "1", script="rolling-restart", code=1)
    assert "agent:agent-0 is not healthy after 1 s" in said
    assert "agent:agent-1" not in said


def test_jobs_that_cannot_be_imported_never_reach_an_agent(machine: Machine) -> None:
    machine.boots()
    machine.install()
    first = machine.release
    (machine.source / "shop" / "jobs.py").write_text("import pandas\n")
    (machine.stubs / "jobs-are-broken").touch()
    machine.forget()
    said = machine.install(code=1)
    assert "No module named 'pandas'" in said
    assert "the agents go on with the release that they have" in said
    assert machine.release == first
    assert not any(" restart " in one for one in machine.calls("supervisorctl"))
    (machine.stubs / "jobs-are-broken").unlink()
    assert "which is not complete" in machine.install(), "half a release is made anew"


def test_a_pip_that_fails_is_told_and_changes_nothing_in_use(machine: Machine) -> None:
    (machine.stubs / "pip-fails").touch()
    said = machine.install(code=1)
    assert "No matching distribution" in said
    assert "PIP_INDEX_URL" in said
    assert not (machine.root / "opt/thunderagent/current").exists()


def test_pip_installs_the_versions_that_were_tested_or_those_of_the_project(machine: Machine) -> None:
    for pins in (ROOT / "constraints.txt", machine.source / "constraints.txt"):
        if pins.parent == machine.source:
            pins.write_text("boto3==1.40.0\n")
        machine.install()
        used = machine.root / "opt/thunderagent" / machine.release / "constraints.txt"
        assert used.read_text() == pins.read_text()
        assert f" --constraint {used} " in machine.calls("python")[-2]


def test_wheels_are_all_that_is_installed_and_no_index_is_asked(machine: Machine) -> None:
    wheels = machine.source.parent / "wheels"
    wheels.mkdir()
    for name in ("dep-1-py3-none-any.whl", "shop-1-py3-none-any.whl"):
        (wheels / name).write_text("1")
    machine.install("--wheels", str(wheels), "--python", "3.11")
    [pip] = [call for call in machine.calls("python") if call.startswith("-m pip")]
    assert pip.endswith(f" --no-index {wheels}/dep-1-py3-none-any.whl {wheels}/shop-1-py3-none-any.whl")
    assert "nothing to do" in machine.install("--wheels", str(wheels), "--python", "3.11")
    (wheels / "dep-1-py3-none-any.whl").write_text("2")
    (machine.stubs / "pip-fails").touch()
    said = machine.install("--wheels", str(wheels), code=1)
    assert "make the release" in said
    assert "The wheels must be all that is needed, for " in said


def test_the_python_that_is_asked_for_is_installed(machine: Machine) -> None:
    assert "would: install Python 3.12 with apt-get" in machine.install("--python", "3.12", "--dry-run")


def test_the_environment_is_never_overwritten(machine: Machine) -> None:
    machine.install()
    path = machine.root / "etc/thunderagent/environment"
    path.write_text(path.read_text() + "AWS_PROFILE=shop\n")
    mine = path.read_text()
    assert "nothing to do" in machine.install(), "changes of the operator are no reason for anything"
    said = machine.install("--processes", "7")
    assert "is yours and stays as it is" in said
    assert path.read_text() == mine
    assert "AGENT_PROCESSES=7\n" in machine.read("etc/thunderagent/environment.new")
    assert "nothing to do" in machine.install("--processes", "7")

    (machine.root / "opt/thunderagent/environment.template").write_text("# of an older version\n")
    assert "environment.new" in machine.install()
    assert path.read_text() == mine
    assert "nothing to do" in machine.install(), "told once"


def test_a_unit_that_has_changed_restarts_the_service_as_a_whole(machine: Machine) -> None:
    machine.boots()
    machine.install()
    (machine.root / "etc/systemd/system/thunderagent.service").write_text("[Unit]\n")
    machine.forget()
    machine.install()
    calls = [call for call in machine.calls("systemctl") if not call.startswith("is-active")]
    assert calls == ["daemon-reload", "restart thunderagent"]


def test_agents_of_their_own_units_are_left_alone(machine: Machine) -> None:
    machine.boots()
    wants = machine.root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    (wants / "thunderagent@1.service").symlink_to("/etc/systemd/system/thunderagent@.service")
    assert "agents run as units thunderagent@" in machine.install()
    assert not any(call.startswith(("start", "enable")) for call in machine.calls("systemctl"))


def test_python_is_installed_where_there_is_none(machine: Machine) -> None:
    (machine.stubs / "bin/python3.11").rename(machine.stubs / "later/python3.11")
    for name in ("python3.13", "python3.12", "python3"):
        machine.stub(f"bin/{name}", "exit 1")
    assert "install Python 3.11 or newer with apt-get" in machine.install()
    assert machine.calls("apt-get")[-1].endswith("python3 python3-venv")


def test_python_is_installed_on_amazon_linux_too(machine: Machine) -> None:
    (machine.stubs / "bin/python3.11").rename(machine.stubs / "later/python3.11")
    (machine.stubs / "bin/apt-get").unlink()
    machine.stub("bin/dnf", STUBS["apt-get"])
    assert "install Python 3.11 with dnf" in machine.install()
    assert machine.calls("dnf") == ["install -y -q python3.11 python3.11-pip"]


def test_a_system_without_python_and_without_a_way_to_it_is_told_what_is_needed(machine: Machine) -> None:
    for name in ("python3.11", "apt-get"):
        (machine.stubs / "bin" / name).unlink()
    assert "neither apt-get nor dnf" in machine.install(code=1)


def test_a_folder_that_is_no_project_needs_a_package_beside_it(machine: Machine) -> None:
    (machine.source / "pyproject.toml").unlink()
    assert "add --package thunderagent" in machine.install(code=2)
    assert machine.tree() == {}
    machine.install("--package", "thunderagent==1.2.0")
    assert any(call.endswith("/constraints.txt thunderagent==1.2.0") for call in machine.calls("python"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs", "a b"], "not the name of a package"),
        (["--processes", "0"], "from 1 to 99"),
        (["--store", "sqlite:///relative.db"], "absolute path"),
        (["--source", "/no/such/folder"], "is not a folder"),
        (["--package"], "needs a value"),
        (["--extras", "a;b"], "list such as"),
        (["--wheels", "/no/such/folder"], "holds no wheels"),
        (["--constraints", "/no/such/file"], "is not a file"),
        (["--python", "3.10"], "3.11 at least"),
        (["--frobnicate"], "no option --frobnicate"),
    ],
)
def test_wrong_options_are_named_before_anything_is_done(machine: Machine, arguments: list[str], words: str) -> None:
    assert words in machine.run(*arguments, code=2)
    assert machine.tree() == {}


def test_a_rollback_with_nothing_to_go_back_to_says_so(machine: Machine) -> None:
    assert "no release before this one" in machine.run("--rollback", code=1)


def test_a_log_rotation_beside_that_of_supervisor_is_warned_of(machine: Machine) -> None:
    (machine.root / "etc/logrotate.d").mkdir(parents=True)
    (machine.root / "etc/logrotate.d/agents").write_text("/var/log/thunderagent/*.log { daily }\n")
    assert "lines get lost" in machine.install()


def test_commands_run_with_the_settings_of_the_service(machine: Machine) -> None:
    machine.install("--store", "dynamodb://Shop?region=eu-central-1")
    path = machine.root / "etc/thunderagent/environment"
    path.write_text(path.read_text() + 'AWS_PROFILE="my shop"\n# NO=1\n  THUNDERAGENT_LOG_JSON=true\nbroken line\n')
    said = machine.run("env", script="with-environment").splitlines()
    assert "THUNDERAGENT_STORE=dynamodb://Shop?region=eu-central-1" in said, "the file has the last word"
    assert "AWS_PROFILE=my shop" in said
    assert "THUNDERAGENT_LOG_JSON=true" in said
    assert "AGENT_RUN=/run/thunderagent" in said, "as the unit has it"
    assert not any(line.startswith("NO=") for line in said)


def test_a_release_that_something_still_runs_from_is_kept(machine: Machine) -> None:
    machine.install()
    first = machine.root / "opt/thunderagent" / machine.release
    with subprocess.Popen(["/bin/sh", "-c", "read line", f"{first}/venv/bin/python"], stdin=subprocess.PIPE) as agent:
        for version in (2, 3):
            (machine.source / "shop" / "jobs.py").write_text(f"VERSION = {version}\n")
            machine.install()
        assert first.is_dir(), "an agent that drains would import code that is gone"
        agent.communicate(b"\n")
    elsewhere = ["/bin/sh", "-c", "read line", f"/elsewhere/releases/{first.name}/venv/bin/python"]
    with subprocess.Popen(elsewhere, stdin=subprocess.PIPE) as stranger:
        assert f"take away the old release {first.name}" in machine.install(), "it runs from another folder"
        stranger.communicate(b"\n")
