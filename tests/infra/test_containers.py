"""The image and the template of containers: what differs from machines, and that nothing else does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.infra.rendering import ACCOUNT, INFRA, ROOT, Rendered
from tests.infra.test_templates import AGENTS, CONTAINERS, SECRET, WITH_ALL, documents
from thunderagent.settings import load_settings

sys.path.insert(0, str(ROOT / "scripts"))

from deployment.package import SKIPPED

DOCKERFILE: Final = INFRA / "Dockerfile"
PUSHES: Final = {
    "PushPolicyArn": f"arn:aws:iam::{ACCOUNT}:policy/push",
    "PushEndpoint": "https://a.example/live",
    "ConnectionStore": "dynamodb://Connections?region=eu-central-1",
}
REGIONS: Final = {
    "ArbiterRegion": "eu-north-1",
    "RegionPreferred": "eu-central-1",
    "RegionalUrl": "wss://a.example/live",
    "OtherRegion": "eu-west-1",
    "OtherUrl": "wss://b.example/live",
    "TokenSecretArn": SECRET,
}


def instructions(path: Path = DOCKERFILE) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments; continued lines are one."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (one.partition(" ") for one in joined.split("\n") if one)]


def last(word: str) -> str:
    """The argument of an instruction of the last stage."""
    stage = instructions()[[name for name, _ in instructions()].index("FROM", 2) :]
    return [rest for name, rest in stage if name == word][-1]


def agent(**more: str) -> dict[str, Any]:
    """The container of a rendered template."""
    [one] = Rendered("containers", {**CONTAINERS, **more}).properties("Task")["ContainerDefinitions"]
    return dict(one)


def test_the_image_is_built_in_two_stages_from_a_tag_and_is_not_root() -> None:
    words = [name for name, _ in instructions()]
    [base] = [rest for name, rest in instructions() if name == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=python:3\.[0-9]+-slim-[a-z]+", base), "a tag that does not move to another system"
    assert [rest for name, rest in instructions() if name == "FROM"] == ["${BASE} AS build", "${BASE}"]
    assert "ADD" not in words, "nothing comes from a URL"
    assert last("USER") == "10001:10001", "a number, which Kubernetes can tell from root"
    assert all("--from=build" in rest for name, rest in instructions()[words.index("FROM", 2) :] if name == "COPY")


def test_process_1_hands_signals_on_and_no_shell_is_between() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["tini", "--"]
    assert json.loads(last("CMD")) == ["thunderagent", "run", "jobs"]
    assert last("STOPSIGNAL") == "SIGTERM"


def test_the_image_leaves_out_what_machines_do_not_get_either() -> None:
    listed = (INFRA / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("**/") for line in listed if not line.startswith("#")} == set(SKIPPED)
    assert all(line.startswith(("**/", "#")) for line in listed), "at any depth"


def test_ecs_checks_what_the_image_checks_and_that_is_whether_the_agent_lives() -> None:
    options, _, command = last("HEALTHCHECK").partition("CMD ")
    check = agent()["HealthCheck"]
    assert ["CMD", *json.loads(command)] == check["Command"]
    assert "--alive" in check["Command"], "a store that is away would end the whole fleet"
    told = {name: int(number) for name, number in re.findall(r"--([a-z-]+)=([0-9]+)", options)}
    keys = {"interval": "Interval", "timeout": "Timeout", "start-period": "StartPeriod", "retries": "Retries"}
    assert told == {name: check[key] for name, key in keys.items()}
    assert f"THUNDERAGENT_HEALTH_FOLDER={check['Command'][-2]}" in last("ENV")


def test_what_is_written_to_is_a_volume_of_the_image_and_the_rest_is_read_only() -> None:
    one = agent()
    assert one["ReadonlyRootFilesystem"] is True
    assert {mount["ContainerPath"] for mount in one["MountPoints"]} == set(json.loads(last("VOLUME")))
    task = Rendered("containers", CONTAINERS).properties("Task")
    assert {mount["SourceVolume"] for mount in one["MountPoints"]} == {volume["Name"] for volume in task["Volumes"]}


@pytest.mark.parametrize("drain_s", ["0", "90", "110"])
def test_a_container_has_longer_than_its_drain_takes_to_stop(drain_s: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = agent(AgentDrainSeconds=drain_s)
    for entry in one["Environment"]:
        monkeypatch.setenv(entry["Name"], str(entry["Value"]))
    settings = load_settings()
    assert settings.drain_s == float(drain_s)
    assert settings.stop_wait_s == one["StopTimeout"] == 120, "the most that Fargate gives"


@pytest.mark.parametrize("more", [{}, WITH_ALL, PUSHES, REGIONS], ids=["plain", "all", "pushes", "regions"])
def test_agents_in_containers_have_the_settings_of_those_on_machines(
    more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Rendered("agents", {**AGENTS, **more}).properties("Template")["LaunchTemplateData"]["UserData"]
    text = data.partition("<<'SETTINGS'\n")[2].partition("\nSETTINGS\n")[0]
    of_machines = dict(word.split("=", 1) for word in text.split())
    [store] = re.findall(r"--store '(\S+)'", data)
    one = {entry["Name"]: entry["Value"] for entry in agent(**more)["Environment"]}
    for name, value in one.items():
        monkeypatch.setenv(name, str(value))
    load_settings()
    of_image = ("THUNDERAGENT_LOG_JSON",)
    only_there = {"THUNDERAGENT_EC2_NOTICES", *of_image}  # Fargate has no such service: its notice is TERM
    only_here = {"AWS_DEFAULT_REGION", "THUNDERAGENT_DRAIN_S", "THUNDERAGENT_STOP_WAIT_S"}
    assert {name: value for name, value in one.items() if name not in only_here} == {
        "THUNDERAGENT_STORE": store,
        **{name: value for name, value in of_machines.items() if name not in only_there},
    }
    assert all(f"{name}=true" in last("ENV") for name in of_image)


def test_further_settings_come_before_the_agent_without_a_shell() -> None:
    assert agent(Jobs="shop.jobs")["Command"] == ["thunderagent", "run", "shop.jobs"]
    given = "THUNDERAGENT_QUEUES=default:10,reports:2 THUNDERAGENT_SHARDS=4"
    assert agent(Settings=given)["Command"] == ["env", *given.split(), "thunderagent", "run", "jobs"]


def test_what_both_templates_ask_for_is_asked_alike() -> None:
    machines, containers = (Rendered.template_of(name)["Parameters"] for name in ("agents", "containers"))
    for name in machines.keys() & containers.keys():
        ours, theirs = ({**one[name], "Description": ""} for one in (containers, machines))
        assert ours == theirs, name
    of_machines = {
        "AgentProcesses", "ArtefactBucket", "ArtefactKey", "DrainSeconds", "ImageId", "InstanceType", "MaxSize",
        "MinSize", "Python", "SessionManager", "Tracing", "VolumeSize", "WaitForSignals", "WarmupSeconds",
    }  # fmt: skip
    assert machines.keys() - containers.keys() <= of_machines


@pytest.mark.parametrize("more", [{}, WITH_ALL, REGIONS, PUSHES], ids=["plain", "all", "regions", "pushes"])
def test_agents_in_containers_may_do_what_those_on_machines_may(more: dict[str, str]) -> None:
    machine = Rendered("agents", {**AGENTS, **more}).properties("Role")
    role = Rendered("containers", {**CONTAINERS, **more}).properties("TaskRole")
    assert documents(role) == {"agent": documents(machine)["agent"]}
    assert role["ManagedPolicyArns"] == machine["ManagedPolicyArns"]
    [statement] = role["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}


def test_fargate_may_fetch_images_of_this_account_and_write_this_log() -> None:
    [document] = documents(Rendered("containers", CONTAINERS).properties("ExecutionRole")).values()
    assert {one["Sid"]: one["Resource"] for one in document["Statement"]} == {
        "Login": "*",
        "Pull": f"arn:aws:ecr:*:{ACCOUNT}:repository/*",
        "Log": "<Log.Arn>",
    }


def test_the_page_names_the_defaults_of_the_parameters() -> None:
    page = (ROOT / "docs" / "guides" / "containers.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"`([A-Z][A-Za-z]+)` \(`?(\w+)`?\)", page))
    defaults = Rendered("containers", CONTAINERS).parameters
    assert len(told) == 14
    assert told == {name: str(defaults[name]) for name in told}


def test_containers_have_the_alarms_and_follow_the_metrics_of_machines() -> None:
    machines, containers = Rendered("agents", AGENTS), Rendered("containers", CONTAINERS)
    kinds = ("AWS::CloudWatch::Alarm", "AWS::Logs::LogGroup", "AWS::Logs::MetricFilter")
    theirs, ours = (
        {name: told for name, told in made.resources.items() if told["Type"] in kinds}
        for made in (machines, containers)
    )
    for name in ("LogsNotForwarded", "MachinesFailed"):  # Fargate forwards; its circuit breaker counts
        del theirs[name]
    assert ours == theirs
    for name in ("FollowConnections", "FollowBacklog"):
        wanted = machines.properties(name)["TargetTrackingConfiguration"]
        made = containers.properties(name)["TargetTrackingScalingPolicyConfiguration"]
        assert {key: made[key] for key in wanted} == wanted
        assert containers.properties(name)["ScalingTargetId"] == "<Scaling>"
    assert containers.properties("Scaling")["ResourceId"] == "service/<Cluster>/<Service.Name>"


def test_an_agent_that_ends_is_started_again_in_its_place_unless_it_ends_at_once() -> None:
    one = agent()
    assert one["RestartPolicy"] == {"Enabled": True, "RestartAttemptPeriod": 60}
    assert one["Essential"] is True, "then its task ends, and the circuit breaker counts it"


def test_a_deployment_that_fails_goes_back_and_does_not_undo_what_scaling_decided() -> None:
    service = Rendered("containers", {**CONTAINERS, "OnDemandBase": "2", "SpotWeight": "3"}).properties("Service")
    assert service["DeploymentConfiguration"]["DeploymentCircuitBreaker"] == {"Enable": True, "Rollback": True}
    assert "DesiredCount" not in service
    assert service["CapacityProviderStrategy"] == [
        {"CapacityProvider": "FARGATE", "Base": "2", "Weight": 1},
        {"CapacityProvider": "FARGATE_SPOT", "Weight": "3"},
    ]
    cluster = Rendered("containers", CONTAINERS).properties("Cluster")
    assert cluster["CapacityProviders"] == [one["CapacityProvider"] for one in service["CapacityProviderStrategy"]]
    nowhere = Rendered("containers", {**CONTAINERS, "OnDemandWeight": "0", "SpotWeight": "0"})
    assert [told.startswith("OnDemandWeight and SpotWeight are both 0") for told in nowhere.refused] == [True]
    assert Rendered("containers", CONTAINERS).refused == []


@pytest.mark.parametrize("image", ["shop", "shop:", "https://x/shop:1", "shop:1 --privileged", "shop@sha256:12"])
def test_an_image_without_a_tag_or_with_something_else_is_refused(image: str) -> None:
    with pytest.raises(AssertionError):
        Rendered("containers", {**CONTAINERS, "Image": image})


@pytest.mark.parametrize(
    "image", ["shop:42", "ghcr.io/a/shop:v1", "127.0.0.1:5000/shop:1", f"a/shop@sha256:{'0' * 64}"]
)
def test_images_of_every_registry_are_taken(image: str) -> None:
    assert agent(Image=image)["Image"] == image
