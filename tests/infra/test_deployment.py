"""`scripts/deploy` and `scripts/destroy`: what they show and ask, do, and say when it goes wrong."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from rich.console import Console
from typer.testing import CliRunner

from tests.acceptance.processes import until
from tests.docs.test_install import SECRETS, skipped
from tests.infra.rendering import ROOT, Rendered
from tests.infra.test_templates import CAPPED, PROVISIONED, STRONG, given
from tests.infra.world import REGION, World, engine, parameters_of, resources_of
from thunderagent.client import Client
from thunderagent.model.task import Status
from thunderagent.ops.doctor.stacks import INDEX_UNITS, TABLE_UNITS
from thunderagent.ops.local_engine import stop
from thunderagent.stores import open_engine
from thunderagent.stores.tasks import TaskStore
from thunderagent.telemetry.prices import (
    ALARM_DOLLARS,
    INSIGHTS_EVENT_DOLLARS,
    INSIGHTS_RULE_DOLLARS,
    MONTH_S,
    PROVISIONED_READ_DOLLARS,
    PROVISIONED_WRITE_DOLLARS,
    store_dollars,
)

sys.path.insert(0, str(ROOT / "scripts"))

from deployment import artefacts, changes, states
from deployment.__main__ import app
from deployment.changes import Change, ChangeSet
from deployment.cloud import Cloud, open_cloud
from deployment.code import Code
from deployment.conditions import holds, refusals, wanted_resources
from deployment.deploying import Declined
from deployment.errors import DeploymentError, WrongOption, told
from deployment.local import made_locally
from deployment.plan import STACKS, chosen
from deployment.progress import Follower, why
from deployment.takeover import WantedTable, lacking, prepare, refuse_impossible
from deployment.templates import Parameter, parameters, read
from deployment.values import HIDDEN, Origin, Value, refuse_unknown, values_of
from deployment.values import given as given_values

SAID: Final = {**os.environ, "COLUMNS": "110", "PYTHONPATH": str(ROOT / "scripts"), "NO_COLOR": "1"}


# One command, everything


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run what `scripts/deploy` and `scripts/destroy` run."""
    return subprocess.run(
        [sys.executable, "-m", "deployment", *arguments],
        env={name: value for name, value in {**SAID, **environment}.items() if not name.startswith("AWS_")},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.ministack
@pytest.mark.processes
def test_one_command_makes_everything_and_another_takes_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ("--local", "--local-folder", str(tmp_path), "--yes")
    monkeypatch.setenv("COLUMNS", "110")

    def run(*arguments: str) -> str:
        done = said_by(*arguments, *local)
        assert done.exit_code == 0, done.output
        return str(done.stdout)

    try:
        first = command("deploy", *local, "--parameter", "Image=shop:42")
        assert first.returncode == 0, first.stdout + first.stderr
        made = first.stdout
        assert f"{len(STACKS)} of {len(STACKS)} stacks changed" in made
        assert "left out on a local engine: HealthCheck (AWS::Route53::HealthCheck)" in made
        settings = dict(re.findall(r"^export (\w+)='(.*)'$", made, re.MULTILINE))
        store = TaskStore(open_engine(settings["THUNDERAGENT_STORE"]))
        from tests.support.engine import put

        put(store, "kept")
        assert "Nothing to change." in run("deploy")
        unasked = said_by("deploy", "--prefix", "other", "--stack", "doorbell", *local[:-1])
        assert "nobody is here to be asked" in unasked.stderr
        assert "there is nothing to destroy" in run("destroy", "--prefix", "other")
        changed = run("deploy", "--stack", "doorbell", "--parameter", "EventSources=shop")
        assert "EventSources: (nothing) → shop (given)" in changed
        assert re.search(r"Modify +│ Rule ", changed)
        gone = run("destroy")
        assert f"{len(STACKS)} stacks destroyed" in gone
        assert "kept DynamoDB::Table TaskTable" in gone
        assert "there is nothing to destroy" in run("destroy")
        assert "takes over what is there already: TaskTable" in run("deploy", "--stack", "table")
        assert store.get(["kept"])["kept"].job == "test.job"
        store.engine.close()
        stop(tmp_path)  # what was deployed outlives its engine
        assert "Nothing to change." in run("deploy", "--stack", "table", "--parameter", "Endpoint=http://127.0.0.1:1")
    finally:
        stop(tmp_path)


@pytest.mark.parametrize("name", ["deploy", "destroy"])
def test_the_front_is_free_of_what_shellcheck_finds_and_its_help_has_an_example(name: str) -> None:
    front = ROOT / "scripts" / name
    assert f"-m deployment {name} " in front.read_text()
    said = said_by(name, "--help").stdout
    assert f"scripts/{name} --region" in said
    assert "Exit codes" in said
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-x", front], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def said_by(*arguments: str) -> Any:
    """What a command says, run in this process."""
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_without_credentials_or_a_region_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = said_by("deploy", "--region", "eu-central-1", "--yes")
    assert done.exit_code == 1
    assert "no usable AWS credentials" in done.stderr
    assert "scripts/deploy --local" in done.stderr
    done = said_by("deploy", "--yes")
    assert done.exit_code == 2
    assert "no AWS region: give --region" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["deploy", "--stack", "tabel"], "there is no stack 'tabel'; there are control, table, "),
        (["deploy", "--parameter", "MaxSize"], "write NAME=VALUE or STACK.NAME=VALUE"),
        (["deploy", "--parameter", "tabel.MaxSize=3"], "there is no stack 'tabel'"),
        (["deploy", "--source", "nowhere"], "--source nowhere is not a folder"),
        (["deploy", "--source", "docs"], "neither pyproject.toml nor setup.py"),
        (["deploy", "--code", "nowhere"], "'nowhere' does not exist"),
    ],
)
def test_wrong_options_are_told_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(ROOT)
    done = said_by(*arguments, "--local", "--yes", "--region", REGION, "--local-folder", str(tmp_path))
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", "").split())
    assert not list(tmp_path.iterdir())


def test_what_was_deployed_nowhere_cannot_be_destroyed(tmp_path: Path) -> None:
    done = said_by("destroy", "--local", "--local-folder", str(tmp_path))
    assert done.exit_code == 1
    assert "no local engine runs" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("name", ["deploy", "destroy"])
def test_help_and_errors_call_the_command_by_the_name_of_its_script(name: str) -> None:
    assert f"Usage: scripts/{name} [OPTIONS]" in command(name, "--lcoal").stderr


def test_keys_that_were_given_to_a_local_stack_once_stay() -> None:
    cloud, stack = Cloud(region=REGION, endpoint="http://127.0.0.1:1"), chosen(["wsapi"])[0]

    def decided(given: dict[str, str], before: dict[str, str]) -> dict[str, Value]:
        made = {"CodeBucket": "b", "CodeKey": "k.zip", **made_locally(cloud, before)}
        values, _ = values_of(stack.name, parameters(stack), given=given, outputs={}, made=made, before=before)
        return {one.parameter.name: one for one in values}

    first = decided({"Jwks": '{"keys":[1]}'}, {})
    again = decided({}, {name: one.value for name, one in first.items()} | {"Endpoint": "http://127.0.0.1:2"})
    assert (again["Jwks"].value, again["Jwks"].origin) == ('{"keys":[1]}', Origin.KEPT)
    assert again["Endpoint"].value == cloud.endpoint  # the engine may have another port by now
    assert decided({}, {})["Jwks"].value == '{"keys": []}'


def test_a_name_that_cannot_begin_a_stack_is_refused() -> None:
    done = said_by("deploy", "--prefix", "1st", "--region", REGION)
    assert done.exit_code == 2
    assert "letters, digits and dashes" in " ".join(done.stderr.split())


# What happens to stacks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with engine(tmp_path_factory.mktemp("engine")) as made:
        yield made


@pytest.fixture
def clean(world: World) -> Iterator[World]:
    """The engine; what the test leaves is destroyed."""
    world.answers, world.width = True, 120
    world.said.clear()
    world.asked.clear()
    yield world
    world.answers = True
    world.destroy(with_data=True)


def noted_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, Any]]]:
    """Services, actions and arguments of all that is asked of AWS from now on."""
    from botocore.client import BaseClient

    calls: list[tuple[str, str, dict[str, Any]]] = []
    ask = BaseClient._make_api_call

    def noted(client: Any, action: str, arguments: Any) -> Any:
        calls.append((client.meta.service_model.service_name, action, arguments))
        return ask(client, action, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", noted)
    return calls


def drop_table(world: World, region: str) -> None:
    """Delete a table that no stack has."""
    cloud = Cloud(region=region, endpoint=world.endpoint)
    dynamodb = cloud.client("dynamodb")
    dynamodb.update_table(TableName="TaskTable", DeletionProtectionEnabled=False)
    dynamodb.delete_table(TableName="TaskTable")
    cloud.close()


@pytest.mark.ministack
@pytest.mark.processes
class TestStacks:
    def test_what_differs_by_hand_is_put_back_when_that_is_asked_for(
        self, clean: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = noted_calls(monkeypatch)
        clean.deploy("control", revert_drift=True)  # a new stack differs in nothing
        clean.deploy("control")
        clean.deploy("control", revert_drift=True)
        asked = [arguments.get("DeploymentMode") for _, action, arguments in calls if action == "CreateChangeSet"]
        assert asked == [None, None, "REVERT_DRIFT"]

    def test_who_declines_has_changed_nothing(self, clean: World) -> None:
        clean.answers = False
        with pytest.raises(Declined):
            clean.deploy("control")
        assert clean.asked == ["Change ta-control?"]
        assert "Add" in clean.said[-1]
        assert states.state_of(clean.cloud, "ta-control") is None

    def test_a_value_that_was_given_stays_and_is_told(self, clean: World) -> None:
        clean.deploy("table", AlarmQueue="orders", DeletionPolicy="Delete", DeletionProtection="false")
        clean.deploy("table")
        assert "nothing to change" in clean.said[-1]
        clean.deploy("table", OldestReadySeconds="60")
        assert "OldestReadySeconds: 300 → 60 (given)" in clean.said[-1]
        assert "AlarmQueue: orders (kept; the default is (nothing))" in clean.said[-1]

    def test_a_stack_that_cannot_be_made_says_which_resource_was_to_blame_and_can_be_made_afterwards(
        self, clean: World
    ) -> None:
        with pytest.raises(DeploymentError) as failed:
            clean.deploy("table", Endpoint="", DeletionPolicy="Delete")  # with an alarm that the engine does not have
        assert "ta-table ended as ROLLBACK_COMPLETE" in str(failed.value)
        assert "OldestReadyOfAll (AWS::CloudWatch::Alarm): " in str(failed.value)
        assert str(failed.value).count("AWS::CloudWatch::Alarm)") == 1  # the others only followed
        clean.deploy("table", DeletionPolicy="Delete", DeletionProtection="false")
        assert "Delete what is left of ta-table?" in clean.asked
        assert "what was given then is to be given again" in clean.said[-1]
        assert "TaskTable" in resources_of(clean, "ta-table")

    def test_an_update_that_fails_leaves_the_stack_as_it_was(self, clean: World) -> None:
        clean.deploy("table", DeletionPolicy="Delete", DeletionProtection="false")
        with pytest.raises(DeploymentError, match="The stack is as it was before"):
            # A change of conditions alone is none for the engine.
            clean.deploy("table", Endpoint="", OldestReadySeconds="60")
        state = states.state_of(clean.cloud, "ta-table")
        assert state is not None
        assert state.parameters["Endpoint"] == clean.endpoint

    def test_a_table_that_somebody_made_by_hand_is_taken_over_with_its_tasks(self, clean: World) -> None:
        from tests.support.engine import put
        from thunderagent.stores.dynamo.engine import DynamoEngine
        from thunderagent.stores.dynamo.table import create_table

        made = DynamoEngine("ByHand", endpoint=clean.endpoint)
        create_table(made)
        put(TaskStore(made), "kept")
        clean.deploy("table", TableName="ByHand")
        assert "takes over what is there already: ByHand" in clean.said[-1]
        assert TaskStore(made).get(["kept"])["kept"].job == "test.job"
        assert resources_of(clean, "ta-table")["TaskTable"]["PhysicalResourceId"] == "ByHand"
        made.close()

    def test_containers_wait_for_an_image_and_a_new_image_is_a_new_revision(self, clean: World) -> None:
        clean.deploy("containers")
        assert "left out: it needs --parameter Image=…" in clean.said[-1]
        assert states.state_of(clean.cloud, "ta-containers") is None

        def running() -> tuple[str, int]:
            ecs, made = clean.cloud.client("ecs"), resources_of(clean, "ta-containers")
            [service] = ecs.describe_services(
                cluster=made["Cluster"]["PhysicalResourceId"], services=[made["Service"]["PhysicalResourceId"]]
            )["services"]
            task = ecs.describe_task_definition(taskDefinition=service["taskDefinition"])["taskDefinition"]
            [agent] = task["containerDefinitions"]
            return agent["image"], task["revision"]

        clean.deploy("containers", Image="shop:42")
        left_out = " ".join(clean.said[-1].split()).partition("left out on a local engine: ")[2]
        for name in ("Scaling", "FollowConnections", "FollowBacklog"):
            assert f"{name} (AWS::ApplicationAutoScaling::" in left_out
        assert running() == ("shop:42", 1)
        clean.deploy("containers", Image="shop:43")
        assert "Image: shop:42 → shop:43 (given)" in clean.said[-1]
        assert running() == ("shop:43", 2)

    def test_tables_are_destroyed_only_in_so_many_words(self, clean: World) -> None:
        clean.deploy("control")
        kept = clean.destroy()
        assert kept.kept == [("DynamoDB::Table", "ThunderAgentArbiter")]
        tables = clean.cloud.client("dynamodb").list_tables()["TableNames"]
        assert "ThunderAgentArbiter" in tables
        clean.deploy("control")
        assert clean.destroy(with_data=True).kept == []
        assert "all tables with what is in them" in clean.asked[-1]
        assert "ThunderAgentArbiter" not in clean.cloud.client("dynamodb").list_tables()["TableNames"]

    def test_a_replica_region_is_deployed_as_a_global_table(self, clean: World) -> None:
        clean.deploy("table", ReplicaRegion="eu-west-1", DeletionPolicy="Delete", DeletionProtection="false")
        assert re.findall(r"│ Add +│ (\w*TaskTable) ", clean.said[-1]) == ["GlobalTaskTable"]
        found = resources_of(clean, "ta-table")
        assert found["GlobalTaskTable"]["PhysicalResourceId"] == "TaskTable"
        assert "TaskTable" not in found

    def test_a_table_that_is_left_becomes_a_global_table_in_the_order_of_aws(
        self, clean: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.support.engine import put
        from thunderagent.stores.dynamo.engine import DynamoEngine

        def there(region: str) -> TaskStore:
            return TaskStore(DynamoEngine("TaskTable", endpoint=clean.endpoint, region=region))

        clean.deploy("table")
        put(there(REGION), "kept")
        with pytest.raises(DeploymentError, match="TaskTable is a table of us-east-1 alone") as refused:
            clean.deploy("table", ReplicaRegion="eu-west-1")
        assert "run scripts/destroy for this stack" in str(refused.value)
        clean.destroy("table")
        clean.answers = False
        with pytest.raises(Declined):
            clean.deploy("table", ReplicaRegion="eu-west-1")
        assert clean.asked[-1] == "Change TaskTable?"
        clean.answers = True
        calls = noted_calls(monkeypatch)
        with pytest.raises(DeploymentError):  # the engine imports no global table
            clean.deploy("table", ReplicaRegion="eu-west-1")
        said = clean.said[-1]
        assert said.index("turn on its stream") < said.index("add its replica in eu-west-1")
        changed = [arguments for _, action, arguments in calls if action in ("UpdateTable", "CreateChangeSet")]
        stream = {"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"}
        assert changed[0] == {"TableName": "TaskTable", "StreamSpecification": stream}
        assert changed[1] == {
            "TableName": "TaskTable",
            "ReplicaUpdates": [{"Create": {"RegionName": "eu-west-1"}}],
        }
        [claimed] = json.loads(changed[2]["TemplateBody"])["Resources"].values()
        assert claimed["Type"] == "AWS::DynamoDB::GlobalTable"
        assert claimed["Properties"]["StreamSpecification"] == {"StreamViewType": stream["StreamViewType"]}
        # What replicas have each by itself is left to the update after it.
        assert claimed["Properties"]["Replicas"] == [{"Region": REGION}, {"Region": "eu-west-1"}]
        assert there("eu-west-1").get(["kept"])["kept"].job == "test.job"
        for region in (REGION, "eu-west-1"):
            drop_table(clean, region)

    def test_provisioned_units_and_caps_are_deployed_and_what_the_rules_refuse_is_told_with_its_values(
        self, clean: World
    ) -> None:
        gone = {"DeletionPolicy": "Delete", "DeletionProtection": "false"}
        with pytest.raises(WrongOption, match=r"STRONG needs regions of one set.*WitnessRegion=eu-west-3"):
            clean.deploy("table", Consistency="STRONG", ReplicaRegion="us-east-2", WitnessRegion="eu-west-3")
        clean.deploy("table", **CAPPED, **gone)
        clean.deploy("table", **PROVISIONED)
        dynamodb = clean.cloud.client("dynamodb")
        table = dynamodb.describe_table(TableName="TaskTable")["Table"]
        units = table["ProvisionedThroughput"]
        assert [int(units[f"{kind}CapacityUnits"]) for kind in ("Read", "Write")] == [5, 60]
        assert "TableWriteScaling (AWS::ApplicationAutoScaling::ScalableTarget)" in clean.said[-1]  # left out here

    def test_code_is_in_a_private_bucket_whose_last_version_goes_with_the_stacks(self, clean: World) -> None:
        s3, bucket = clean.cloud.client("s3"), f"ta-artefacts-000000000000-{REGION}"
        s3.create_bucket(Bucket=bucket)  # as a run has left it that was ended at once
        clean.deploy("doorbell")
        assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())
        assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
        assert json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"]) == artefacts.tls_only(bucket)
        [rule] = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
        # Whatever a stack names is a current version, which nothing ends: machines boot from it in a year.
        assert {name for name in rule if name not in ("ID", "Status", "Filter", "Prefix")} == {
            "NoncurrentVersionExpiration",
            "AbortIncompleteMultipartUpload",
        }
        key = parameters_of(clean, "doorbell")["CodeKey"]
        s3.put_object(Bucket=bucket, Key=key, Body=b"overwritten")
        s3.delete_object(Bucket=bucket, Key=key)
        assert len(s3.list_object_versions(Bucket=bucket, Prefix=key)["Versions"]) == 2
        clean.destroy()
        assert bucket not in [one["Name"] for one in s3.list_buckets()["Buckets"]]

    def test_a_bucket_that_was_there_keeps_what_its_operator_set(self, clean: World) -> None:
        s3, bucket = clean.cloud.client("s3"), f"ta-artefacts-000000000000-{REGION}"
        s3.create_bucket(Bucket=bucket)
        policy = artefacts.tls_only(bucket)
        policy["Statement"][0]["Sid"] = "Mine"
        tags = [{"Key": "team", "Value": "shop"}]
        rule = {"ID": "mine", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}
        s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": tags})
        s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
        for _ in range(2):
            clean.deploy("doorbell")
            assert f"the bucket {bucket} keeps its own policy, lifecycle\n" in clean.said[-1]
        assert json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"]) == policy
        assert s3.get_bucket_tagging(Bucket=bucket)["TagSet"] == tags
        assert [one["ID"] for one in s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]] == ["mine"]
        assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"

        s3.delete_bucket_policy(Bucket=bucket)
        clean.deploy("doorbell")  # it lacks one setting and has the others
        assert json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"]) == artefacts.tls_only(bucket)

    def test_code_of_a_user_stays_and_is_what_agents_and_the_function_run(self, clean: World, shop: Shop) -> None:
        stacks = ("table", "doorbell", "agents")
        clean.deploy(*stacks, source=shop.source, folders=[shop.events], Jobs="shop", **ROUTED)
        first = [parameters_of(clean, name) for name in stacks]
        outputs = clean.deploy(*stacks, MaxSize="8", MemorySize="256").outputs
        for key, option, stack in (("CodeKey", "--code", "doorbell"), ("ArtefactKey", "--source", "agents")):
            [kept] = {one[key] for one in first if key in one}
            assert f"/{kept}; new code: {option} FOLDER, or --stack {stack} --builtin" in clean.said[-1]
            assert f"  {key}: {kept} (kept)" in clean.said[-1]
        assert parameters_of(clean, "agents") == {**first[2], "MaxSize": "8"}
        shop.order(clean, "17")
        with shop.agent(clean, f"{outputs['StoreUrl']}&endpoint={clean.endpoint}") as store:
            [task] = until(lambda: [one for one in store.list(queue="shop") if one.status is Status.SUCCESS], 30, "it")
        assert task.result == "delivered 17"

    def test_own_code_is_that_of_this_version_and_can_replace_that_of_a_user(
        self, clean: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clean.deploy("agents")
        assert "the agents run ThunderAgent's own jobs" in clean.said[-1]
        own = parameters_of(clean, "agents")["ArtefactKey"]
        monkeypatch.setattr(artefacts, "PARTS", artefacts.PARTS[1:])  # another version
        clean.deploy("agents")
        assert f"ArtefactKey: {own} → " in clean.said[-1]
        clean.deploy("agents", source=shop.source)
        assert f"Jobs=jobs is not in {shop.source}: name what is to run with" in clean.said[-1]
        clean.deploy("agents", source=shop.source, Jobs="shop")
        assert "name what is to run" not in clean.said[-1]
        with pytest.raises(WrongOption, match="Jobs=shop of agents is not in ThunderAgent's own code"):
            clean.deploy("agents", is_builtin=True)
        clean.deploy("agents", is_builtin=True, Jobs="jobs")
        assert artefacts.is_builtin(parameters_of(clean, "agents")["ArtefactKey"])

    def test_a_key_goes_back_to_code_of_an_earlier_day(self, clean: World, shop: Shop) -> None:
        clean.deploy("agents", source=shop.source, Jobs="shop")
        first = parameters_of(clean, "agents")
        (shop.source / "shop" / "__init__.py").write_text("")
        clean.deploy("agents", source=shop.source)
        assert parameters_of(clean, "agents")["ArtefactKey"] != first["ArtefactKey"]
        clean.deploy("agents", ArtefactKey=first["ArtefactKey"])
        clean.deploy("agents")
        assert parameters_of(clean, "agents") == first
        with pytest.raises(WrongOption, match=r"with InstanceType=t3.small: for InstanceType=t4g\.small give --source"):
            clean.deploy("agents", InstanceType="t4g.small")  # its wheels are for the other processor
        with pytest.raises(WrongOption, match="with Tracing=false: for Tracing=true give --source"):
            clean.deploy("agents", Tracing="true")  # its wheels send no spans
        clean.deploy("agents", InstanceType="m7i.large")

    def test_the_bucket_of_a_stack_stays(self, clean: World, shop: Shop) -> None:
        s3 = clean.cloud.client("s3")
        for name in ("mine", "other"):
            s3.create_bucket(Bucket=name)
        clean.deploy("doorbell", bucket="mine")
        clean.deploy("doorbell", "agents", MemorySize="256")
        assert parameters_of(clean, "doorbell")["CodeBucket"] == "mine"
        assert parameters_of(clean, "agents")["ArtefactBucket"] == f"ta-artefacts-000000000000-{REGION}"
        clean.deploy("doorbell", bucket="other")
        assert parameters_of(clean, "doorbell")["CodeBucket"] == "other"
        clean.deploy("doorbell", folders=[shop.events])
        assert parameters_of(clean, "doorbell")["CodeBucket"] == "other"

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"bucket": "mine"}, "doorbell keeps its code, with CodeBucket=ta-artefacts-.*: for CodeBucket=mine give"),
            (
                {"Architecture": "arm64"},
                "=x86_64: for Architecture=arm64 give --code FOLDER, or --stack doorbell --builtin too",
            ),
            ({"is_builtin": True}, "Handler=shop_events.handler of doorbell is not in ThunderAgent's own code"),
            ({"CodeKey": "mine.zip"}, "CodeKey=mine.zip of doorbell is not in the bucket ta-artefacts-"),
            ({"CodeKey": "mine.zip", "folders": [ROOT / "jobs"]}, "--code and CodeKey=mine.zip: give one of them"),
            ({"source": ROOT}, "--source: none of table, doorbell takes it"),
            ({"folders": [ROOT / "jobs"], "is_builtin": True}, "--code and --builtin: give one of them"),
        ],
    )
    def test_what_does_not_fit_the_code_that_stays_is_refused_before_anything_is_done(
        self, clean: World, shop: Shop, given: dict[str, Any], words: str
    ) -> None:
        clean.deploy("doorbell", folders=[shop.events], **ROUTED)
        with pytest.raises(WrongOption, match=words):
            clean.deploy("table", "doorbell", **given)
        assert states.state_of(clean.cloud, "ta-table") is None

    def test_code_of_an_earlier_version_is_refused_if_machines_cannot_check_it_and_replaced_if_it_is_ours(
        self, clean: World
    ) -> None:
        clean.cloud.client("s3").create_bucket(Bucket="earlier")
        code = Code(cloud=clean.cloud, console=Console(file=io.StringIO()), prefix="ta")
        kept = {"ArtefactBucket": "earlier", "ArtefactKey": f"thunderagent/agents/{'0123' * 8}.tar.gz"}
        clean.cloud.client("s3").put_object(Bucket="earlier", Key=kept["ArtefactKey"])
        [agents] = chosen(["agents"])
        for asked, before in (({}, kept), (kept, {})):
            with pytest.raises(WrongOption, match=r"no hash .*: give --source FOLDER, or --stack agents --builtin$"):
                code.check("agents", parameters(agents), asked, before)
        before = {"CodeBucket": "earlier", "CodeKey": f"thunderagent/lambda/{'0123' * 8}.zip"}
        for stack in chosen(["wsapi", "failover"]):
            code.check(stack.name, parameters(stack), {"Architecture": "arm64"}, before)
            made = code.make(stack.name, parameters(stack), {}, {}, before)
            assert made["CodeBucket"] == "earlier"
            assert artefacts.is_builtin(made["CodeKey"])
        [doorbell] = chosen(["doorbell"])
        kept = {"Handler": "thunderagent.router.deployed.handler"}  # as an earlier version called it
        with pytest.raises(WrongOption, match=r"--parameter doorbell.Handler=thunderagent\.router\.function\.handler$"):
            code.check("doorbell", parameters(doorbell), {}, kept)
        code.check("doorbell", parameters(doorbell), {}, {"Handler": "thunderagent.router.function.handler"})

    def test_code_that_is_gone_is_not_kept_in_silence(self, clean: World, shop: Shop) -> None:
        clean.deploy("agents", source=shop.source, Jobs="shop")
        known = parameters_of(clean, "agents")
        clean.cloud.client("s3").delete_object(Bucket=known["ArtefactBucket"], Key=known["ArtefactKey"])
        with pytest.raises(DeploymentError, match=r"the code of agents, s3://.*, is gone: give --source"):
            clean.deploy("agents", MaxSize="8")
        clean.deploy("agents", source=shop.source, MaxSize="8")
        assert parameters_of(clean, "agents") == {**known, "MaxSize": "8"}

    def test_a_stack_that_lacks_a_resource_is_not_called_complete(
        self, clean: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forgetful(cloud: Cloud, name: str) -> list[dict[str, Any]]:
            return [one for one in real(cloud, name) if one["LogicalResourceId"] != "Arbiter"]

        real = states.check_physical_ids
        monkeypatch.setattr("deployment.deploying.check_physical_ids", forgetful)
        with pytest.raises(DeploymentError, match="it lacks Arbiter"):
            clean.deploy("control")


ROUTED: Final = {"Handler": "shop_events.handler", "EventDetailTypes": "OrderPlaced"}


@dataclass(frozen=True, slots=True)
class Shop:
    """A user's project and router."""

    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / "project"

    @property
    def events(self) -> Path:
        return self.folder / "events"

    def order(self, world: World, order: str) -> None:
        """Put an event that only the user's router knows."""
        detail = json.dumps({"order": order})
        entry = {"Source": "shop", "DetailType": "OrderPlaced", "Detail": detail}
        world.cloud.client("events").put_events(Entries=[entry])

    @contextmanager
    def agent(self, world: World, store: str) -> Iterator[Client]:
        """An agent out of what machines fetch, and a client of its store."""
        known = parameters_of(world, "agents")
        found = world.cloud.client("s3").get_object(Bucket=known["ArtefactBucket"], Key=known["ArtefactKey"])
        root, client = self.folder / "machine", Client.from_settings(store=store)
        with tarfile.open(fileobj=io.BytesIO(found["Body"].read())) as archive:
            archive.extractall(root, filter="data")
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "thunderagent", "run", known["Jobs"], "--queue", "shop"],
            env={**os.environ, "PYTHONPATH": f"{root}:{root / 'source'}", "THUNDERAGENT_STORE": store},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield client
        finally:
            agent.terminate()
            agent.wait(30)
            client.close()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    files = {
        "project/pyproject.toml": "[project]\nname = 'shop'\nversion = '1'\n",
        "project/shop/__init__.py": """
from thunderagent import Context, job

@job("shop.deliver", queue="shop")
def deliver(ctx: Context, payload: dict[str, str]) -> str:
    return f"delivered {payload['order']}"
""",
        "events/shop_events.py": """
from thunderagent.router import Enqueue, EventBridgeEvent, Router

router = Router()

@router.eventbridge(source="shop", detail_type="OrderPlaced")
def order_placed(detail: dict[str, str], event: EventBridgeEvent) -> Enqueue:
    return Enqueue("shop.deliver", detail, queue="shop")

handler = router.handler
""",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Shop(tmp_path)


def wanted(type_: str, *regions: str, **properties: Any) -> WantedTable:
    """A table of a template in us-east-1 and these regions."""
    filled = {"BillingMode": "PAY_PER_REQUEST", "Replicas": [{"Region": one} for one in (REGION, *regions)]}
    type_ = f"AWS::DynamoDB::{type_}"
    return WantedTable(logical="T", type=type_, name="Tasks", home=REGION, properties=filled | properties)


ON_DEMAND: Final = {"BillingModeSummary": {"BillingMode": "PAY_PER_REQUEST"}}
REPLICA: Final = {"Replicas": [{"RegionName": "eu-west-1", "ReplicaStatus": "ACTIVE"}]}
IMAGES: Final = {"StreamSpecification": {"StreamViewType": "NEW_AND_OLD_IMAGES"}}


@pytest.mark.parametrize(
    ("table", "there", "words"),
    [
        (wanted("Table"), ON_DEMAND | REPLICA, "replicas in eu-west-1, which the stack would not have"),
        (wanted("GlobalTable", "eu-west-2"), ON_DEMAND | REPLICA, "--parameter ReplicaRegion="),
        (wanted("GlobalTable", "eu-west-1", MultiRegionConsistency="STRONG"), ON_DEMAND, "only a new table"),
        (wanted("GlobalTable"), ON_DEMAND | {"MultiRegionConsistency": "STRONG"}, "there with Consistency STRONG"),
        (wanted("Table"), {}, "there with BillingMode PROVISIONED"),
        (wanted("GlobalTable", "eu-west-1", BillingMode="PROVISIONED"), {}, "--billing-mode PAY_PER_REQUEST"),
        (wanted("GlobalTable", BillingMode="PROVISIONED"), {}, "--billing-mode PAY_PER_REQUEST"),
        (wanted("GlobalTable", "eu-west-1", BillingMode="PROVISIONED"), REPLICA, "--billing-mode PAY_PER_REQUEST"),
        (wanted("GlobalTable", BillingMode="PROVISIONED"), ON_DEMAND, "there with BillingMode PAY_PER_REQUEST"),
        (
            wanted("GlobalTable", **IMAGES),
            ON_DEMAND | {"StreamSpecification": {"StreamEnabled": True, "StreamViewType": "KEYS_ONLY"}},
            "update-table --region us-east-1 --table-name Tasks --stream-specification StreamEnabled=false",
        ),
    ],
)
def test_a_table_that_cannot_become_what_its_import_claims_is_refused(
    table: WantedTable, there: dict[str, Any], words: str
) -> None:
    with pytest.raises(DeploymentError, match=re.escape(words)):
        lacking(table, there)


class SlowTable:
    """A client of DynamoDB whose table shows a change only in a later description."""

    def __init__(self, *later: dict[str, Any]) -> None:
        self._later = list(later)
        self.changes: list[dict[str, Any]] = []

    def update_table(self, **arguments: Any) -> None:
        self.changes.append(arguments)

    def describe_table(self, TableName: str) -> dict[str, Any]:
        assert TableName == "Tasks"
        return {"Table": {"TableStatus": "ACTIVE"} | (self._later.pop(0) if self._later else ON_DEMAND | REPLICA)}


def test_an_import_waits_until_each_step_is_seen_and_all_regions_are_at_rest() -> None:
    slow = SlowTable(ON_DEMAND, ON_DEMAND | {"Replicas": [{"RegionName": "eu-west-1", "ReplicaStatus": "CREATING"}]})
    waits: list[float] = []
    cloud = Cloud(region=REGION, sleep=waits.append, monotonic=lambda: sum(waits), _clients={"dynamodb": slow})
    table = wanted("GlobalTable", "eu-west-1")
    prepare(cloud, [table], lacking(table, ON_DEMAND))
    assert slow.changes == [{"TableName": "Tasks", "ReplicaUpdates": [{"Create": {"RegionName": "eu-west-1"}}]}]
    assert len(waits) == 2
    stuck = Cloud(region=REGION, sleep=waits.append, monotonic=lambda: sum(waits) * 1e4, _clients=cloud._clients)
    slow._later = [{"TableStatus": "UPDATING"}] * 9
    with pytest.raises(DeploymentError, match="run this again when all are ACTIVE"):
        prepare(stuck, [table], [])


def test_a_table_that_is_what_its_import_claims_needs_nothing() -> None:
    on = {"StreamSpecification": {"StreamEnabled": True, **IMAGES["StreamSpecification"]}}
    assert lacking(wanted("GlobalTable", "eu-west-1", **IMAGES), ON_DEMAND | REPLICA | on) == []
    assert lacking(wanted("Table"), ON_DEMAND | on) == []
    assert lacking(wanted("Table", BillingMode="PROVISIONED"), on) == []
    strong = {"MultiRegionConsistency": "STRONG"}
    assert lacking(wanted("GlobalTable", "eu-west-1", **strong), ON_DEMAND | REPLICA | strong) == []


GLOBAL: Final = {"ReplicaRegion": "eu-west-1"}
STRONGLY: Final = STRONG | {"ReplicaRegion": "us-east-2", "WitnessRegion": "us-west-2"}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"TableName": "Other"}, None),
        ({"Global": "true"}, GLOBAL, None),
        (GLOBAL, GLOBAL | {"SecondReplicaRegion": "eu-west-2"}, None),
        ({}, GLOBAL, "a table of us-east-1 alone"),
        ({"DeletionPolicy": "Delete"}, GLOBAL, "give --parameter DeletionPolicy=Retain alone, run scripts/destroy"),
        (GLOBAL, {}, "give --parameter Global=true"),
        (GLOBAL, {"ReplicaRegion": "eu-west-2"}, "change one of eu-west-1, eu-west-2 with each run"),
        (GLOBAL, STRONGLY, "cannot change to STRONG in us-east-1, us-east-2"),
        (STRONGLY, STRONGLY | {"SecondReplicaRegion": "us-west-2", "WitnessRegion": ""}, "make another table"),
    ],
)
def test_what_cloudformation_cannot_do_to_a_table_is_refused_before_it_is_asked(
    before: dict[str, str], after: dict[str, str], words: str | None
) -> None:
    [stack] = chosen(["table"])
    none: dict[str, str] = {}
    values, _ = values_of("table", parameters(stack), given=after, outputs=none, made=none, before=none)
    with nullcontext() if words is None else pytest.raises(DeploymentError, match=words):
        refuse_impossible(read(stack), before, values, REGION)


def test_the_table_of_states_cannot_become_a_global_table_in_its_stack_either() -> None:
    [stack] = chosen(["wsapi"])
    none: dict[str, str] = {}
    values, _ = values_of("wsapi", parameters(stack), given=GLOBAL, outputs=none, made=none, before=none)
    with pytest.raises(DeploymentError, match="ThunderAgentState is a table of us-east-1 alone"):
        refuse_impossible(read(stack), none, values, REGION)


class Listing:
    """A client of CloudFormation that lists what it is told to."""

    def __init__(self, *resources: dict[str, str]) -> None:
        self._resources = list(resources)

    def get_paginator(self, name: str) -> Listing:
        assert name == "list_stack_resources"
        return self

    def paginate(self, **_: str) -> list[dict[str, Any]]:
        return [{"StackResourceSummaries": self._resources}]


def listing(*resources: dict[str, str]) -> Cloud:
    return Cloud(region=REGION, endpoint="http://127.0.0.1:1", _clients={"cloudformation": Listing(*resources)})


def test_a_resource_without_a_physical_id_is_found_out() -> None:
    queue = {"LogicalResourceId": "Q", "ResourceType": "AWS::SQS::Queue", "ResourceStatus": "CREATE_COMPLETE"}
    assert states.check_physical_ids(listing(queue | {"PhysicalResourceId": "q"}), "ta") == [
        queue | {"PhysicalResourceId": "q"}
    ]
    for wrong in ([queue], [queue | {"PhysicalResourceId": ""}], []):
        with pytest.raises(DeploymentError, match="do not exist"):
            states.check_physical_ids(listing(*wrong), "ta")
    with pytest.raises(DeploymentError, match="CREATE_FAILED"):
        states.check_physical_ids(listing(queue | {"PhysicalResourceId": "q", "ResourceStatus": "CREATE_FAILED"}), "ta")


class Stacks:
    """A client of CloudFormation with one stack that goes from state to state, one for each look."""

    def __init__(self, *statuses: str, reasons: dict[str, str] | None = None) -> None:
        self._statuses = list(statuses)
        self._reasons = reasons or {}
        self._told: list[dict[str, str]] = []

    def describe_stacks(self, StackName: str) -> dict[str, Any]:
        status = self._statuses[0]
        if len(self._statuses) > 1:
            del self._statuses[0]
        if status != "REVIEW_IN_PROGRESS":
            self._tell(StackName, "AWS::CloudFormation::Stack", status)
        for name, reason in self._reasons.items():
            self._tell(name, "AWS::SQS::Queue", "CREATE_FAILED", reason)
        return {"Stacks": [{"StackName": StackName, "StackId": StackName, "StackStatus": status}]}

    def _tell(self, name: str, type_: str, status: str, reason: str = "") -> None:
        event = {"EventId": f"{name}{status}", "LogicalResourceId": name, "ResourceType": type_}
        self._told.insert(0, {**event, "ResourceStatus": status, "ResourceStatusReason": reason})

    def get_paginator(self, name: str) -> Stacks:
        assert name == "describe_stack_events"
        return self

    def paginate(self, **_: str) -> list[dict[str, Any]]:
        return [{"StackEvents": list(self._told)}]


def following(client: Stacks) -> Follower:
    """A follower whose time passes by itself."""
    now = [0.0]
    cloud = Cloud(
        region=REGION,
        endpoint="http://127.0.0.1:1",
        sleep=lambda s: now.__setitem__(0, now[0] + s),
        monotonic=lambda: now[0],
        _clients={"cloudformation": client},
    )
    return Follower(cloud, Console(file=io.StringIO()), "ta-table")


def test_a_stack_whose_work_has_not_begun_yet_is_followed_to_its_end() -> None:
    follower = following(Stacks("REVIEW_IN_PROGRESS", "REVIEW_IN_PROGRESS", "CREATE_IN_PROGRESS", "CREATE_COMPLETE"))
    assert follower.until_done() == "CREATE_COMPLETE"
    # An update of a stack at rest: what it tells at first is what it was before.
    follower = following(Stacks("REVIEW_IN_PROGRESS", "UPDATE_IN_PROGRESS", "UPDATE_COMPLETE"))
    assert follower.until_done() == "UPDATE_COMPLETE"


def test_a_stack_that_does_not_come_to_rest_is_let_go_and_can_be_followed_again() -> None:
    with pytest.raises(DeploymentError, match="CREATE_IN_PROGRESS after 60 s"):
        following(Stacks("CREATE_IN_PROGRESS")).until_done(60.0)


def test_resources_that_fail_because_another_did_are_not_to_blame() -> None:
    reasons = {"First": "the name is taken", "Second": "Resource creation cancelled"}
    follower = following(Stacks("CREATE_IN_PROGRESS", "ROLLBACK_COMPLETE", reasons=reasons))
    status = follower.until_done()
    assert str(why(follower, "ta-table", status)) == (
        "the stack ta-table ended as ROLLBACK_COMPLETE:\n  First (AWS::SQS::Queue): the name is taken\n"
        "What had been made was taken back. Mend it and run this again: the rest of the stack is deleted then."
    )


# What is shown


def parameter(name: str, default: str | None = "", *, is_secret: bool = False) -> Parameter:
    return Parameter(name=name, type="String", default=default, description="", is_secret=is_secret)


def shown(width: int, *values: Value) -> str:
    """What is printed of some changes on a terminal of this width."""
    some = (
        Change(action="Add", resource="OldestReadyOfQueue", type="CloudWatch::Alarm", replacement="", what=""),
        Change(action="Modify", resource="TaskTable", type="DynamoDB::Table", replacement="True", what="KeySchema"),
        Change(action="Remove", resource="LostEvents", type="SQS::Queue", replacement="", what=""),
    )
    console = Console(file=io.StringIO(), width=width)
    changes.show(console, ChangeSet(id="1", stack="ta-table", changes=some), values)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [36, 60, 80, 140])
def test_changes_fit_on_terminals_of_every_width_and_what_is_lost_is_told(width: int) -> None:
    said = shown(width)
    assert max(map(len, said.splitlines())) <= width
    flat = " ".join(said.split())
    for word in ("OldestReadyOfQueue", "DynamoDB::Table", "KeySchema"):
        assert word in flat
    assert "made anew without what it holds: TaskTable (DynamoDB::Table), LostEvents (SQS::Queue)" in flat


def test_secrets_are_not_shown_and_are_kept_without_being_known() -> None:
    secret = parameter("Token", is_secret=True)
    new = Value(parameter=secret, value="hush", origin=Origin.GIVEN, before="****")
    assert "hush" not in shown(120, new)
    assert f"Token: {HIDDEN} → {HIDDEN} (given)" in shown(120, new)
    kept = Value(parameter=secret, value="****", origin=Origin.KEPT, before="****")
    assert kept.argument == {"ParameterKey": "Token", "UsePreviousValue": True}
    assert not kept.is_changed


# Values


def test_the_nearest_source_of_a_value_decides() -> None:
    sources: dict[str, dict[str, str]] = {
        "given": {"A": "given", "table.A": "of the stack"},
        "outputs": {"A": "output", "B": "output"},
        "made": {"A": "made", "B": "made", "C": "made"},
        "before": {"A": "before", "B": "before", "C": "before", "D": "before"},
    }
    known = {name: parameter(name, "default") for name in "ABCDE"} | {"F": parameter("F", None)}
    values, missing = values_of("table", known, **sources)
    assert {one.parameter.name: one.value for one in values} == {
        "A": "of the stack",
        "B": "output",
        "C": "made",
        "D": "before",
        "E": "default",
    }
    assert [one.name for one in missing] == ["F"]
    values, _ = values_of("agents", known, **sources)
    assert values[0].value == "given"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"MinReadUnits": "9", "MaxReadUnits": "10"}, None),
        ({"MinReadUnits": "10", "MaxReadUnits": "9"}, "MinReadUnits=10 is more than MaxReadUnits=9"),
        ({"WarmReadUnits": "20000"}, None),
        ({"WarmReadUnits": "15000"}, "WarmReadUnits=15000 is less than the 16000 of now"),
        ({"WarmReadUnits": ""}, None),
    ],
)
def test_numbers_that_cannot_go_together_are_refused(given: dict[str, str], words: str | None) -> None:
    known = {name: parameter(name) for name in ("MinReadUnits", "MaxReadUnits", "WarmReadUnits")}
    sources: dict[str, dict[str, str]] = {"outputs": {}, "made": {}, "before": {"WarmReadUnits": "16000"}}
    with nullcontext() if words is None else pytest.raises(WrongOption, match=words):
        values_of("table", known, given=given, **sources)


def test_values_of_the_command_line_may_hold_anything_and_a_misspelt_name_is_answered_with_the_right_one() -> None:
    assert given_values(["A=b=c", "table.A="]) == {"A": "b=c", "table.A": ""}
    known = {"table": {"AlarmQueue": parameter("AlarmQueue")}}
    refuse_unknown({"AlarmQueue": "x", "table.AlarmQueue": "x"}, known)
    for name in ("AlarmQeue", "table.AlarmQeue"):
        with pytest.raises(DeploymentError, match="did you mean AlarmQueue"):
            refuse_unknown({name: "x"}, known)
    with pytest.raises(DeploymentError, match="no stack of this run"):
        refuse_unknown({"agents.AlarmQueue": "x"}, known)


@pytest.mark.parametrize("stack", [one.name for one in STACKS])
def test_templates_and_their_conditions_are_read_as_cfn_lint_reads_them(stack: str) -> None:
    [one] = chosen([stack])
    template = read(one)
    assert template == Rendered.template_of(stack)
    declared = parameters(one)
    assert declared.keys() == template["Parameters"].keys()
    if stack not in ("failover", "wsapi"):
        rendered = Rendered(stack, given(stack))
        values = {name: str(value) for name, value in rendered.parameters.items()}
        wanted = wanted_resources(template, values, rendered.region)
        assert wanted == {name: told["Type"] for name, told in rendered.resources.items()}


@pytest.mark.parametrize(
    "given",
    [
        {},
        PROVISIONED,
        PROVISIONED | {"MinReadUnits": ""},
        CAPPED,
        {"ReplicaRegion": "eu-central-1"},
        STRONG,
        STRONG | {"WitnessRegion": "us-east-1"},
        STRONG | {"ReplicaRegion": ""},
    ],
)
def test_rules_are_judged_as_the_tests_of_templates_judge_them(given: dict[str, str]) -> None:
    rendered = Rendered("table", given)
    values = {name: str(value) for name, value in rendered.parameters.items()}
    found = refusals(read(chosen(["table"])[0]), values, rendered.region)
    assert [one.partition(" (")[0] for one in found] == rendered.refused


def test_a_condition_that_cannot_be_judged_is_told() -> None:
    with pytest.raises(DeploymentError, match="cannot be judged"):
        holds({"Fn::Equals": [{"Fn::FindInMap": ["a", "b", "c"]}, "x"]}, {}, {})
    with pytest.raises(DeploymentError, match="cannot be judged"):
        holds({"Fn::EachMemberIn": [["a"], ["x"]]}, {}, {})


# Errors of AWS


def refused(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "as it is"}}, "Act")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused("ExpiredToken"), "credentials have expired"),
        (refused("InvalidClientTokenId"), "does not know these credentials"),
        (refused("AccessDenied"), "making it: not allowed. as it is What a deployment needs is in docs/guides/aws.md"),
        (refused("ValidationError"), r"making it: as it is \(ValidationError\)"),
        (EndpointConnectionError(endpoint_url="https://x"), "is the region right"),
    ],
)
def test_what_aws_refuses_is_told_with_the_remedy(error: Exception, words: str) -> None:
    with pytest.raises(DeploymentError, match=words), told("making it"):
        raise error


def test_a_local_engine_needs_neither_a_region_nor_credentials() -> None:
    cloud = open_cloud(None, "http://127.0.0.1:1")
    assert (cloud.region, cloud.endpoint) == (REGION, "http://127.0.0.1:1")
    with pytest.raises(DeploymentError, match="no AWS region"):
        open_cloud(None)


# What machines install


def test_what_machines_install_is_the_same_bytes_for_the_same_files_and_enough_to_install_from(tmp_path: Path) -> None:
    key, content = artefacts.pack()
    assert artefacts.pack() == (key, content)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(tmp_path, filter="data")
    done = subprocess.run(
        [tmp_path / "scripts" / "install-ec2", "--dry-run", "--no-start"],
        env={**os.environ, "INSTALL_ROOT": str(tmp_path / "machine")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "would: switch to the release" in done.stdout
    for needed in ("scripts/complete-termination", "systemd/thunderagent-termination.service"):
        assert (tmp_path / needed).is_file()
    assert os.access(tmp_path / "scripts" / "complete-termination", os.X_OK)


@pytest.mark.parametrize("is_traced", [True, False])
def test_traced_agents_get_what_sends_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_traced: bool) -> None:
    asked: list[str] = []

    def noted(folder: Path, projects: list[tuple[Path, str]], *_: object, **__: object) -> None:
        asked.extend(extras for _, extras in projects)

    monkeypatch.setattr(artefacts, "download_wheels", noted)
    (tmp_path / "requirements.txt").write_text("thunderagent")
    for source in (None, tmp_path):
        artefacts.make_wheels(tmp_path, source, architecture="x86_64", python="3.11", is_traced=is_traced)
    assert ["traces" in extras for extras in asked] == [is_traced, is_traced, False]


def test_a_project_goes_along_without_its_secrets_and_history(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "shop/jobs.py", ".git/config", ".venv/x.py", *SECRETS, *skipped()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    wheels = tmp_path / "dist"
    (wheels / "shop-1-py3-none-any.whl").parent.mkdir(exist_ok=True)
    (wheels / "shop-1-py3-none-any.whl").write_text("x")
    key, content = artefacts.pack(tmp_path, wheels)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = {name for name in archive.getnames() if name.startswith(("source/", "wheels/"))}
    assert found == {"source/pyproject.toml", "source/shop/jobs.py", "wheels/shop-1-py3-none-any.whl"}
    (tmp_path / "shop" / "jobs.py").write_text("y")
    assert artefacts.pack(tmp_path)[0] != key


def test_a_folder_that_is_no_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"neither pyproject\.toml"):
        artefacts.pack(tmp_path)
    with pytest.raises(DeploymentError, match="is not a folder"):
        artefacts.pack(tmp_path / "nothing")


# The page


def test_the_page_names_all_that_the_commands_ask_of_aws(clean: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clean.deploy("table")
    clean.destroy("table")
    calls = noted_calls(monkeypatch)
    clean.answers = False
    with pytest.raises(Declined):  # a change set that is taken back
        clean.deploy("control")
    clean.answers = True
    with pytest.raises(DeploymentError):  # the engine imports no global table
        clean.deploy("table", Global="true")
    clean.deploy("doorbell")
    clean.deploy("agents")  # to a bucket that is there
    clean.destroy()
    asked: dict[str, set[str]] = {}
    for service, action, _ in calls:
        asked.setdefault(service, set()).add(action)
    drop_table(clean, REGION)
    page = (ROOT / "docs" / "guides" / "aws.md").read_text(encoding="utf-8")
    part = page.partition("<!-- asked by")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", part, re.MULTILINE)
    assert {service: set(re.findall(r"`(\w+)`", actions)) for service, actions in rows} == asked


def test_the_page_names_the_stacks_their_defaults_and_what_an_event_may_say() -> None:
    from thunderagent.router.function import DETAIL_TYPE, TaskDetail

    page = (ROOT / "docs" / "guides" / "aws.md").read_text(encoding="utf-8")
    order = [page.index(f"`thunderagent-{one.name}`") for one in STACKS]
    assert order == sorted(order)
    assert DETAIL_TYPE in page
    for name in TaskDetail.model_fields:
        assert f"`{name}`" in page, name
    agents = Rendered("agents", given("agents")).parameters
    for name in ("ConnectionsPerAgent", "BacklogPerAgent", "DrainSeconds"):
        assert f"`{name}`, {agents[name]}" in page, name
    table = Rendered("table", {}).parameters
    for name in ("TableName", "DeletionPolicy", "DeletionProtection", "Consistency"):
        assert f"`{name}` (`{table[name]}`)" in page, name
    for name in ("OldestReadySeconds", "ThrottleEvents"):
        assert f"`{name}` ({table[name]})" in page, name


def test_the_page_tells_what_capacity_costs() -> None:
    page = (ROOT / "docs" / "guides" / "aws.md").read_text(encoding="utf-8")
    part = page.partition("### Capacity")[2].partition("### A table")[0]
    hours = MONTH_S / 3600
    used = [store_dollars(write_units=MONTH_S), store_dollars(read_units=MONTH_S)]
    kept = [hours * PROVISIONED_WRITE_DOLLARS, hours * PROVISIONED_READ_DOLLARS]
    tasks, streams, agents, queues = 50, 100, 20, 2
    caps = [
        2 * (TABLE_UNITS * tasks + 0.2 * streams),
        2 * INDEX_UNITS * tasks,
        2 * (0.5 * tasks + agents),
        2 * agents * queues,
    ]
    capped = store_dollars(write_units=sum(caps[:2]) * MONTH_S, read_units=sum(caps[2:]) * MONTH_S)
    events = TABLE_UNITS + INDEX_UNITS * 2  # a rule for the keys of the table, two for those of the index
    for words in (
        f"${used[0]:.2f} a month; a read unit ${used[1]:.2f}",
        f"${kept[0]:.2f} a month; a read unit ${kept[1]:.2f}. Cheaper",
        f"where more than {100 * kept[0] / used[0]:.0f} % are used",
        f"16 alarms, ${16 * ALARM_DOLLARS:.2f}",
        f"three rules, ${3 * INSIGHTS_RULE_DOLLARS:.2f}",
        f"six rules, ${6 * INSIGHTS_RULE_DOLLARS:.2f} a month, and ${INSIGHTS_EVENT_DOLLARS} for a million",
        f"${events * INSIGHTS_EVENT_DOLLARS:.2f} for a million small tasks",
        f"${capped:,.0f} a month at most",
        f"${store_dollars(write_units=40_000 * MONTH_S):,.0f}",
    ):
        assert words in part, words
    assert [float(one) for one in re.findall(r"^\| `Max\w+` \|.*\| (\d+) \|$", part, re.MULTILINE)] == caps
    for name in parameters(chosen(["table"])[0]):
        assert f"`{name}`" in part or not name.startswith(("Max", "Warm", "Target", "Contributor", "Billing")), name
