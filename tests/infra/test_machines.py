"""What a machine of the Auto Scaling group does when it boots and when it goes, with stand-ins for its tools."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.processes import until
from tests.infra.rendering import ROOT, Rendered
from tests.infra.test_templates import AGENTS, SECRET, WITH_ALL
from tests.support.metadata_service import STATE, MetadataService, metadata_service
from thunderagent.settings import load_settings
from thunderagent.telemetry.logs import utc

SCRIPT: Final = ROOT / "scripts" / "complete-termination"
INSTANCE: Final = "/latest/meta-data/instance-id"


class Tools:
    """Commands of a machine that only note how they were called, and do what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.record = folder / "calls"
        self.record.touch()

    def add(self, name: str, does: str = "") -> None:
        path = self.bin / name
        path.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "{name} $*" >>"{self.record}"\n{does}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.record.read_text().splitlines()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


# When it is taken away


@pytest.fixture
def metadata() -> Iterator[MetadataService]:
    with metadata_service() as service:
        service.answers[STATE] = "InService"
        service.answers[INSTANCE] = "i-0123"
        yield service


def begin(tools: Tools, metadata: MetadataService) -> subprocess.Popen[str]:
    """Start the script as its unit does."""
    told = {"GROUP": "shop-agents", "HOOK": "drain", "EVERY_S": "0.05"}
    return subprocess.Popen(
        ["bash", SCRIPT],
        env={**tools.environment, **told, "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said."""
    try:
        said, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


COMPLETE: Final = (
    "aws autoscaling complete-lifecycle-action --auto-scaling-group-name shop-agents --lifecycle-hook-name drain "
    "--instance-id i-0123 --lifecycle-action-result CONTINUE"
)


def test_a_machine_that_is_taken_away_stops_its_agents_first_and_then_says_that_it_may_go(
    tools: Tools, metadata: MetadataService
) -> None:
    tools.add("systemctl")
    tools.add("aws")
    process = begin(tools, metadata)
    until(lambda: metadata.asked[STATE] >= 3, 10.0, "three looks")
    assert tools.calls == []
    metadata.answers[STATE] = "Terminated"
    code, said = end(process)
    assert tools.calls == ["systemctl stop thunderagent", COMPLETE]
    assert (code, said.splitlines()[-1]) == (0, "drained: the machine may go")


def test_a_machine_without_auto_scaling_or_an_answer_waits(tools: Tools, metadata: MetadataService) -> None:
    tools.add("systemctl")
    tools.add("aws")
    del metadata.answers[STATE]  # 404
    process = begin(tools, metadata)
    until(lambda: metadata.asked[STATE] >= 2, 10.0, "two looks")
    metadata.refusals["/latest/api/token"] = 0  # no answer at all
    before = metadata.asked["/latest/api/token"]
    until(lambda: metadata.asked["/latest/api/token"] >= before + 2, 10.0, "two more")
    assert process.poll() is None
    assert tools.calls == []
    del metadata.refusals["/latest/api/token"]
    metadata.answers[STATE] = "Warmed:Terminated"
    assert end(process)[0] == 0


def test_agents_that_cannot_be_stopped_do_not_keep_the_machine(tools: Tools, metadata: MetadataService) -> None:
    tools.add("systemctl", "exit 1")
    tools.add("aws")
    metadata.answers[STATE] = "Terminated"
    code, said = end(begin(tools, metadata))
    assert code == 0
    assert "could not be stopped" in said
    assert tools.calls[-1] == COMPLETE


def test_auto_scaling_that_does_not_answer_is_asked_again_and_then_left_to_its_hook(
    tools: Tools, metadata: MetadataService
) -> None:
    tools.add("systemctl")
    tools.add("aws", "exit 255")
    metadata.answers[STATE] = "Terminated"
    code, said = end(begin(tools, metadata))
    assert (code, tools.calls.count(COMPLETE)) == (1, 3)
    assert "when the time of the hook is over" in said


def test_the_script_and_its_unit_are_free_of_what_checkers_find(tmp_path: Path) -> None:
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    unit = (ROOT / "systemd" / "thunderagent-termination.service").read_text()
    assert "ExecStart=/usr/local/sbin/complete-termination" in unit
    if shutil.which("systemd-analyze"):
        placed = tmp_path / "thunderagent-termination.service"
        placed.write_text(unit.replace("/usr/local/sbin/complete-termination", "/bin/true"))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", placed], capture_output=True, text=True, check=False
        )
        assert placed.name not in done.stderr, done.stderr


# When it boots

FORWARDER: Final = "opt/aws/amazon-cloudwatch-agent"
CONFIG: Final = f"{FORWARDER}/etc/thunderagent.json"


def boot(tools: Tools, **parameters: str) -> subprocess.CompletedProcess[str]:
    """Run the user data of the launch template; what it does to `/etc`, `/opt` and `/usr` happens below a folder."""
    if (packed := tools.folder / "made.tar.gz").exists():
        parameters = {"ArtefactKey": key_of(packed), **parameters}
    rendered = Rendered("agents", {**AGENTS, **parameters})
    data = rendered.properties("Template")["LaunchTemplateData"]["UserData"]
    for place in ("/etc/", "/opt/thunderagent", "/opt/aws/", "/usr/local/"):
        data = re.sub(rf"(?<![\w\"]){place}", f"{tools.folder}{place}", data)
        (tools.folder / place.strip("/")).mkdir(parents=True, exist_ok=True)
    for folder in ("etc/systemd/system", "etc/thunderagent", "usr/local/sbin", "opt/aws/bin", f"{FORWARDER}/etc"):
        (tools.folder / folder).mkdir(parents=True, exist_ok=True)
    (tools.folder / "etc/thunderagent/environment").write_text("AGENT_JOBS=jobs\n")
    script = tools.folder / "user-data"
    script.write_text(data)
    return subprocess.run(
        ["bash", script], env=tools.environment, capture_output=True, text=True, timeout=60, check=False
    )


def key_of(packed: Path) -> str:
    return f"thunderagent/agents/{hashlib.sha256(packed.read_bytes()).hexdigest()}.tar.gz"


def artefact(tools: Tools, install: str = "", *more: str) -> None:
    """Stand-ins for the tools of a machine, and an artefact whose `install-ec2` does what the test says."""
    tools.add("systemctl")
    tools.add("install-ec2", install)
    made = tools.folder / "made"
    folders = ("scripts", "systemd", *more)
    for name in folders:
        (made / name).mkdir(parents=True)
    shutil.copy(SCRIPT, made / "scripts")
    shutil.copy(ROOT / "systemd" / "thunderagent-termination.service", made / "systemd")
    shutil.move(tools.bin / "install-ec2", made / "scripts" / "install-ec2")
    packed = tools.folder / "made.tar.gz"
    subprocess.run(["tar", "-czf", packed, "-C", made, *folders], check=True)
    tools.add("aws", f'[ "$1" != s3 ] || cp "{packed}" "${{@: -1}}"')
    tools.add("cloud-init", "echo i-0123")
    tools.add("sleep")
    tools.add("dnf")
    tools.add("amazon-cloudwatch-agent-ctl")
    (tools.folder / FORWARDER / "bin").mkdir(parents=True)
    shutil.move(tools.bin / "amazon-cloudwatch-agent-ctl", tools.folder / FORWARDER / "bin")
    tools.add("cfn-signal")
    (tools.folder / "opt/aws/bin").mkdir(parents=True)
    shutil.move(tools.bin / "cfn-signal", tools.folder / "opt/aws/bin/cfn-signal")


OPTIONS: Final = "--jobs jobs --processes 2 --store dynamodb://TaskTable?region=eu-central-1"
BOOT: Final = COMPLETE.replace("shop-agents", "ThunderAgent-agents").replace(" drain ", " boot ")
ABANDON: Final = BOOT.replace("CONTINUE", "ABANDON")
SIGNAL: Final = "cfn-signal --exit-code {} --stack ThunderAgent-agents --resource Agents --region eu-central-1"


def test_a_machine_fetches_its_code_and_installs_it_before_it_starts_it(tools: Tools) -> None:
    artefact(tools)
    done = boot(tools)
    assert done.returncode == 0, done.stderr
    fetched = tools.folder / "opt/thunderagent/artefact/packed"
    assert tools.calls == [
        "dnf install -y -q amazon-cloudwatch-agent",
        f"amazon-cloudwatch-agent-ctl -a fetch-config -m ec2 -s -c file:{tools.folder / CONFIG}",
        f"aws s3 cp --only-show-errors s3://artefacts/{key_of(fetched)} {fetched}",
        f"install-ec2 --no-start {OPTIONS}",
        "systemctl daemon-reload",
        "systemctl enable --quiet --now thunderagent-termination",
        f"install-ec2 {OPTIONS}",
        "cloud-init query instance_id",
        BOOT,
        SIGNAL.format(0),
    ]
    assert fetched.parent.stat().st_mode & 0o777 == 0o700
    told = (tools.folder / "etc/thunderagent/termination").read_text().splitlines()
    assert told == ["AWS_DEFAULT_REGION=eu-central-1", "GROUP=ThunderAgent-agents", "HOOK=drain"]
    assert os.access(tools.folder / "usr/local/sbin/complete-termination", os.X_OK)


def test_a_project_of_yours_is_installed_in_place_of_ours(tools: Tools) -> None:
    artefact(tools, "", "source", "wheels")
    boot(tools, Jobs="shop.jobs", AgentProcesses="4", Python="3.12")
    [first, *_] = [call for call in tools.calls if call.startswith("install-ec2")]
    unpacked = tools.folder / "opt/thunderagent/artefact"
    assert first.endswith(f" --source {unpacked}/source --wheels {unpacked}/wheels --python 3.12")
    assert "--jobs shop.jobs --processes 4" in first


def test_settings_reach_the_environment_of_the_agents_and_are_settings(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact(tools)
    more = "THUNDERAGENT_SLOTS=20 THUNDERAGENT_LEASE_S=600"
    push = {
        "PushPolicyArn": "arn:aws:iam::123456789012:policy/push",
        "PushEndpoint": "https://a1.execute-api.eu-central-1.amazonaws.com/live",
        "ConnectionStore": "dynamodb://Connections?region=eu-central-1",
    }
    region = {"ArbiterRegion": "eu-north-1", "RegionPreferred": "eu-west-1"}
    canary = {
        "RegionalUrl": "wss://a1.execute-api.eu-central-1.amazonaws.com/live",
        "OtherRegion": "eu-west-1",
        "OtherUrl": "wss://b1.execute-api.eu-west-1.amazonaws.com/live",
        "TokenSecretArn": SECRET,
    }
    assert boot(tools, **WITH_ALL, **push, **region, **canary, Settings=more).returncode == 0
    lines = (tools.folder / "etc/thunderagent/environment").read_text().splitlines()
    told = dict(line.split("=", 1) for line in lines if line)
    assert told.pop("AGENT_JOBS") == "jobs"
    assert told["THUNDERAGENT_EC2_NOTICES"] == "true"
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(store="dynamodb://ShopTasks?region=eu-central-1")
    assert (settings.slots, settings.lease_s, settings.cloudwatch_namespace) == (20, 600.0, "Shop")
    targets = {"eu-central-1": canary["RegionalUrl"], "eu-west-1": canary["OtherUrl"]}
    assert (settings.canary_targets, settings.canary_token_from) == (targets, f"secret:{SECRET}")
    arbiter = "dynamodb://ThunderAgentArbiter?region=eu-north-1"
    assert (settings.region, settings.region_preferred) == ("eu-central-1", "eu-west-1")
    assert (settings.region_arbiter, settings.push_connections) == (arbiter, push["ConnectionStore"])
    assert (settings.wake_queue_url, settings.blob_bucket) == (WITH_ALL["WakeQueueUrl"], "texts")


def test_a_machine_sends_each_log_into_a_stream_of_its_own(tools: Tools) -> None:
    artefact(tools)
    assert boot(tools, AgentProcesses="3").returncode == 0
    config = json.loads((tools.folder / CONFIG).read_text())
    assert config.keys() == {"logs"}
    sent = {one["file_path"]: one for one in config["logs"]["logs_collected"]["files"]["collect_list"]}
    kept = (ROOT / "systemd" / "supervisord.conf").read_text().replace("%(ENV_AGENT_LOGS)s", "/var/log/thunderagent")
    name = re.search(r"^stdout_logfile=(.+)$", kept, re.MULTILINE)
    main = re.search(r"^logfile=(.+)$", kept, re.MULTILINE)
    assert name and main
    agents = [name[1] % {"program_name": "agent", "process_num": number} for number in range(3)]
    assert sent.keys() == {"/var/log/cloud-init-output.log", main[1], *agents}
    streams = {one["log_stream_name"] for one in sent.values()}
    assert streams == {f"{{instance_id}}/{Path(path).stem}" for path in sent}
    for one in sent.values():
        assert (one["log_group_name"], one["timezone"]) == ("<Log>", "UTC")
        now = datetime.now(UTC)
        assert datetime.strptime(utc(now), one["timestamp_format"]).replace(tzinfo=UTC) == now


@pytest.mark.parametrize("broken", ["dnf", "amazon-cloudwatch-agent-ctl"])
def test_a_machine_that_cannot_send_its_log_says_so_and_starts_its_agents(tools: Tools, broken: str) -> None:
    artefact(tools)
    tools.add(broken, "exit 1")
    if broken != "dnf":
        shutil.move(tools.bin / broken, tools.folder / FORWARDER / "bin" / broken)
    done = boot(tools)
    assert done.returncode == 0
    alarm = Rendered("agents", AGENTS).properties("LogsNotForwarded")
    told = f"--namespace {alarm['Namespace']} --metric-name {alarm['MetricName']} --unit Count --value 1"
    assert f"aws cloudwatch put-metric-data {told}" in tools.calls
    assert "The log of this machine stays here" in done.stderr
    assert f"install-ec2 {OPTIONS}" in tools.calls


def test_a_traced_agent_sends_its_spans_to_the_collector_of_its_machine(tools: Tools) -> None:
    artefact(tools)
    more = "OTEL_TRACES_SAMPLER=parentbased_traceidratio OTEL_TRACES_SAMPLER_ARG=0.1"
    assert boot(tools, Tracing="true", Settings=more).returncode == 0
    config = json.loads((tools.folder / CONFIG).read_text())
    endpoint = config["traces"]["traces_collected"]["otlp"]["http_endpoint"]
    assert endpoint.startswith("127.0.0.1:")
    told = (tools.folder / "etc/thunderagent/environment").read_text().splitlines()
    assert {"THUNDERAGENT_TRACES=true", f"OTEL_EXPORTER_OTLP_ENDPOINT=http://{endpoint}", *more.split()} <= set(told)


FAILED: Final = (
    "aws cloudwatch put-metric-data --namespace ThunderAgent --metric-name MachinesFailed --unit Count --value 1"
)


def test_a_machine_that_could_not_install_says_so_and_leaves(tools: Tools) -> None:
    artefact(tools, "exit 3")
    done = boot(tools)
    assert done.returncode == 3
    assert tools.calls[-4:] == [SIGNAL.format(3), FAILED, "cloud-init query instance_id", ABANDON]
    assert not any(call.startswith("systemctl") for call in tools.calls)
    alarm = Rendered("agents", AGENTS).properties("MachinesFailed")
    assert FAILED.startswith(f"aws cloudwatch put-metric-data --namespace {alarm['Namespace']} ")
    assert f" --metric-name {alarm['MetricName']} " in FAILED


def test_root_runs_nothing_of_an_artefact_with_another_digest(tools: Tools) -> None:
    artefact(tools)
    done = boot(tools, ArtefactKey=AGENTS["ArtefactKey"])
    assert done.returncode != 0
    assert "packed: FAILED" in done.stdout
    assert not any(call.startswith(("install-ec2", "systemctl")) for call in tools.calls)
    assert tools.calls[-1] == ABANDON


@pytest.mark.parametrize(("refused", "code", "last"), [(5, 0, SIGNAL.format(0)), (99, 1, ABANDON)])
def test_a_role_that_is_not_known_yet_is_waited_for(tools: Tools, refused: int, code: int, last: str) -> None:
    artefact(tools)
    aws = (tools.bin / "aws").read_text()
    count = f'[ "$(grep -c "^aws s3" "{tools.record}")" -gt {refused} ] || exit 254'
    tools.add("aws", f'if [ "$1" = s3 ]; then\n{count}\nfi\n{aws.splitlines()[-1]}')
    done = boot(tools)
    assert (done.returncode, tools.calls[-1]) == (code, last)
    assert tools.calls.count("sleep 10") == min(refused, 30)


def test_nobody_is_told_where_nobody_waits(tools: Tools) -> None:
    artefact(tools)
    assert boot(tools, WaitForSignals="false").returncode == 0
    assert tools.calls[-1] == BOOT


@pytest.mark.parametrize(
    "wrong",
    [
        {"Settings": "THUNDERAGENT_SLOTS=20\nrm -rf /"},
        {"Settings": "PATH=/tmp"},
        {"Settings": "THUNDERAGENT_X=$(id)"},
        {"Jobs": "jobs'; id; '"},
        {"TableName": "a b"},
    ],
)
def test_a_parameter_that_could_become_a_command_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        Rendered("agents", {**AGENTS, **wrong})
