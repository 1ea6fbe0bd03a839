"""The template of the WebSocket API, as it is filled in for AWS and for a local engine."""

from __future__ import annotations

import json
from typing import Any, Final

import boto3
import pytest
from botocore.validate import ParamValidator
from cfnlint.api import ManualArgs, lint_file

from tests.infra.rendering import ACCOUNT, INFRA, Rendered
from thunderagent.websocket_api.permissions import CONNECTION_ACTIONS
from thunderagent.websocket_api.protocol import Action
from thunderagent.websocket_api.records import CONNECTION_S
from thunderagent.websocket_api.server.throttle import CONNECT_RATE, USER_BURST, USER_RATE

REGIONS: Final = ("eu-central-1", "eu-west-1")
GIVEN: Final = {
    "CodeBucket": "artefacts",
    "CodeKey": "thunderagent/lambda/0123.zip",
    "TokenIssuer": "https://login.example.com/",
    "TokenAudience": "thunderagent",
    "JwksUrl": "https://login.example.com/.well-known/jwks.json",
}
DOMAIN: Final = {
    "DomainName": "ws.example.com",
    "CertificateArn": f"arn:aws:acm:eu-central-1:{ACCOUNT}:certificate/12345678-abcd",
}


def wsapi(region: str = "eu-central-1", **more: str) -> Rendered:
    return Rendered("wsapi", GIVEN | more, region)


def statements(rendered: Rendered, role: str) -> list[dict[str, Any]]:
    """All that a role may do."""
    properties = rendered.properties(role)
    documents = [one["PolicyDocument"] for one in properties.get("Policies", [properties])]
    return [statement for document in documents for statement in document["Statement"]]


@pytest.mark.parametrize("template", ["wsapi", "failover"])
def test_the_template_is_free_of_what_cfn_lint_finds_in_both_regions(template: str) -> None:
    found = lint_file(INFRA / f"{template}.yaml", config=ManualArgs(regions=list(REGIONS)))
    assert [str(one) for one in found] == []


@pytest.mark.parametrize("template", ["wsapi", "failover"])
def test_every_parameter_says_what_it_is_and_refuses_what_cannot_work(template: str) -> None:
    rendered = Rendered.template_of(template)
    for name, parameter in rendered["Parameters"].items():
        assert len(parameter["Description"]) > 10, name
        limits = {"AllowedPattern", "AllowedValues", "MinValue", "MinLength", "MaxLength"} & set(parameter)
        assert limits, f"{name} takes anything"
    [groups] = rendered["Metadata"].values()
    listed = [name for group in groups["ParameterGroups"] for name in group["Parameters"]]
    assert sorted(listed) == sorted(rendered["Parameters"])


def test_every_action_of_the_protocol_has_a_route_with_a_response_and_connects_are_authorized() -> None:
    rendered = wsapi()
    routes = {one["RouteKey"]: one for one in rendered.of_type("AWS::ApiGatewayV2::Route")}
    assert set(routes) == {"$connect", "$disconnect", "$default", *Action}
    assert rendered.properties("Api")["RouteSelectionExpression"] == "$request.body.action"
    answered = {one["RouteId"] for one in rendered.of_type("AWS::ApiGatewayV2::RouteResponse")}
    for key, route in routes.items():
        assert route["Target"] == "integrations/<Integration>"
        assert route.get("AuthorizationType") == ("CUSTOM" if key == "$connect" else None)
        name = next(name for name, one in rendered.resources.items() if one.get("Properties") == route)
        is_answered = key not in ("$connect", "$disconnect")
        assert (f"<{name}>" in answered) is is_answered, key
        assert route.get("RouteResponseSelectionExpression") == ("$default" if is_answered else None)
    assert routes["$connect"]["AuthorizerId"] == "<Authorizer>"
    stage = rendered.resources["Stage"]
    names = {name for name, one in rendered.resources.items() if one["Type"] == "AWS::ApiGatewayV2::Route"}
    assert set(stage["DependsOn"]) == names


def test_the_authorizer_is_one_that_aws_takes_and_is_asked_wherever_the_token_is() -> None:
    authorizer = wsapi().properties("Authorizer")
    wanted = boto3.client("apigatewayv2", region_name=REGIONS[0]).meta.service_model.operation_model("CreateAuthorizer")
    assert wanted.input_shape is not None
    assert [name for name in wanted.input_shape.required_members if name not in authorizer] == []
    report = ParamValidator().validate(authorizer, wanted.input_shape)
    assert not report.has_errors(), report.generate_report()
    assert authorizer["IdentitySource"] == []  # who lacks one of several would be refused unheard


def test_access_logs_have_neither_headers_nor_queries_nor_what_was_sent() -> None:
    logs = wsapi().properties("Stage")["AccessLogSettings"]
    told = json.loads(logs["Format"].replace("$context.requestTimeEpoch", "1"))
    assert set(told) >= {"event", "route", "status", "user", "error"}
    assert told["error_string"] == "$context.error.messageString"
    lowered = logs["Format"].lower()
    for secret in ("authorization", "header", "query", "protocol", "body", "token"):
        assert secret not in lowered
    assert "AccessLogSettings" not in wsapi(AccessLogs="false").properties("Stage")


def test_the_role_for_logs_of_the_account_is_made_only_when_it_is_wanted_and_stays() -> None:
    made = wsapi()
    assert made.resources["AccountLogs"]["DeletionPolicy"] == "Retain"
    assert made.resources["AccountLogsRole"]["DeletionPolicy"] == "Retain"
    assert "<AccountLogs>" in made.properties("Stage")["Description"]  # the stage waits for it
    for parameters in ({"AccountLogRole": "present"}, {"AccessLogs": "false"}):
        assert not {"AccountLogs", "AccountLogsRole"} & set(wsapi(**parameters).resources)


def test_requests_are_throttled() -> None:
    settings = wsapi(ThrottlingRate="7", ThrottlingBurst="3").properties("Stage")["DefaultRouteSettings"]
    assert (settings["ThrottlingRateLimit"], settings["ThrottlingBurstLimit"]) == ("7", "3")


def test_one_user_may_take_a_small_part_of_what_all_may() -> None:
    rendered = wsapi()
    stage = rendered.properties("Stage")["DefaultRouteSettings"]
    handler = rendered.properties("HandlerFunction")["Environment"]["Variables"]
    limits = {name: float(handler[f"WSAPI_{name}"]) for name in ("USER_RATE", "USER_BURST", "CONNECT_RATE")}
    assert limits == {"USER_RATE": USER_RATE, "USER_BURST": USER_BURST, "CONNECT_RATE": CONNECT_RATE}
    assert float(stage["ThrottlingRateLimit"]) / 20 >= USER_RATE
    assert float(stage["ThrottlingBurstLimit"]) / 4 >= USER_BURST


def test_the_state_is_a_table_a_global_table_or_the_replica_of_another_region() -> None:
    key = {"KeySchema": [{"AttributeName": "taskId", "KeyType": "HASH"}], "BillingMode": "PAY_PER_REQUEST"}
    plain = wsapi()
    assert "UserStateGlobal" not in plain.resources
    state = plain.properties("UserState")
    assert key.items() <= state.items()
    assert state["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    assert state["DeletionProtectionEnabled"] is True
    assert "TimeToLiveSpecification" not in state  # a user's state never goes by itself
    assert plain.resources["UserState"]["DeletionPolicy"] == "Retain"

    replicated = wsapi(ReplicaRegion="eu-west-1", DeletionProtection="false", DeletionPolicy="Delete")
    assert "UserState" not in replicated.resources
    state = replicated.properties("UserStateGlobal")
    assert key.items() <= state.items()
    assert [one["Region"] for one in state["Replicas"]] == ["eu-central-1", "eu-west-1"]
    for one in state["Replicas"]:
        assert one["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
        assert one["DeletionProtectionEnabled"] is False
    assert state["StreamSpecification"] == {"StreamViewType": "NEW_AND_OLD_IMAGES"}
    assert replicated.resources["UserStateGlobal"]["DeletionPolicy"] == "Delete"
    assert len(wsapi(Global="true").properties("UserStateGlobal")["Replicas"]) == 1

    other = wsapi("eu-west-1", CreateTable="false", ReplicaRegion="eu-central-1")
    assert not {"UserState", "UserStateGlobal"} & set(other.resources)
    for rendered in (plain, replicated, other):
        environment = rendered.properties("HandlerFunction")["Environment"]["Variables"]
        assert environment["WSAPI_STATE_STORE"] == f"dynamodb://ThunderAgentState?region={rendered.region}"


def test_connections_belong_to_their_region_and_go_by_themselves_after_the_longest_one() -> None:
    rendered = wsapi(ReplicaRegion="eu-west-1")
    connections = rendered.properties("Connections")
    assert rendered.resources["Connections"]["Type"] == "AWS::DynamoDB::Table"
    assert connections["TimeToLiveSpecification"] == {"AttributeName": "expireAt", "Enabled": True}
    assert CONNECTION_S > 2 * 3600  # the longest that API Gateway lets one live


def test_the_roles_reach_the_two_tables_this_api_and_their_own_logs_and_nothing_else() -> None:
    rendered = wsapi()
    table = f"arn:aws:dynamodb:eu-central-1:{ACCOUNT}:table/ThunderAgentState"
    pushes = f"arn:aws:execute-api:eu-central-1:{ACCOUNT}:<Api>/live/POST/@connections/*"
    reached = {
        role: {
            (one["Sid"], resource)
            for one in statements(rendered, role)
            for resource in (one["Resource"] if isinstance(one["Resource"], list) else [one["Resource"]])
        }
        for role in ("HandlerRole", "AuthorizerRole", "PushPolicy")
    }
    assert reached == {
        "HandlerRole": {
            ("Logs", "<HandlerLog.Arn>"),
            ("State", table),
            ("Connections", "<Connections.Arn>"),
            ("Push", pushes),
            ("Push", pushes.replace("POST", "DELETE")),
        },
        "AuthorizerRole": {("Logs", "<AuthorizerLog.Arn>")},
        "PushPolicy": {("Connections", "<Connections.Arn>"), ("Push", pushes)},
    }
    may = {
        (role, one["Sid"]): {action.removeprefix("dynamodb:") for action in one["Action"]}
        for role in ("HandlerRole", "PushPolicy")
        for one in statements(rendered, role)
        if one["Sid"] in ("State", "Connections")
    }
    assert may == {
        ("HandlerRole", "State"): {"BatchGetItem", "GetItem", "PutItem", "UpdateItem"},  # of which nobody's is deleted
        ("HandlerRole", "Connections"): {*CONNECTION_ACTIONS, "PutItem"},
        ("PushPolicy", "Connections"): CONNECTION_ACTIONS,
    }
    for role in reached:
        for statement in statements(rendered, role):
            assert not [action for action in statement["Action"] if "*" in action]
    for function, role, log in (
        ("HandlerFunction", "HandlerRole", "HandlerLog"),
        ("AuthorizerFunction", "AuthorizerRole", "AuthorizerLog"),
    ):
        properties = rendered.properties(function)
        assert (properties["Role"], properties["LoggingConfig"]) == (f"<{role}.Arn>", {"LogGroup": f"<{log}>"})


def test_only_this_api_may_call_the_functions() -> None:
    permissions = wsapi().of_type("AWS::Lambda::Permission")
    prefix = f"arn:aws:execute-api:eu-central-1:{ACCOUNT}:<Api>"
    assert {(one["FunctionName"], one["SourceArn"]) for one in permissions} == {
        ("<HandlerFunction>", f"{prefix}/live/*"),
        ("<AuthorizerFunction>", f"{prefix}/authorizers/<Authorizer>"),
    }
    assert {one["Principal"] for one in permissions} == {"apigateway.amazonaws.com"}


def test_the_integration_gives_up_after_the_function_and_before_api_gateway() -> None:
    rendered = wsapi()
    function_s = rendered.properties("HandlerFunction")["Timeout"]
    assert function_s * 1000 < rendered.properties("Integration")["TimeoutInMillis"] < 29_000


def test_settings_that_are_not_given_are_no_empty_variables() -> None:
    by_url = wsapi().properties("AuthorizerFunction")["Environment"]["Variables"]
    assert by_url["WSAPI_JWKS_URL"] == GIVEN["JwksUrl"]
    assert not {"WSAPI_JWKS", "WSAPI_QUERY_TOKEN"} & set(by_url)
    rendered = wsapi(JwksUrl="", Jwks='{"keys":[]}', QueryToken="true")
    by_value = rendered.properties("AuthorizerFunction")["Environment"]["Variables"]
    assert (by_value["WSAPI_JWKS"], by_value["WSAPI_QUERY_TOKEN"]) == ('{"keys":[]}', "1")
    assert "WSAPI_JWKS_URL" not in by_value
    for one in (wsapi(), rendered):
        secrets = one.properties("HandlerFunction")["Environment"]["Variables"]
        assert not [name for name in secrets if "JWKS" in name or "ISSUER" in name]


def test_parameters_that_do_not_fit_together_are_refused_with_a_sentence() -> None:
    assert wsapi().refused == []
    assert wsapi(**DOMAIN).refused == []
    assert "give JwksUrl or Jwks" in wsapi(JwksUrl="").refused[0]
    assert wsapi(ReplicaRegion="eu-central-1").refused == ["ReplicaRegion is the other region, not that of this stack"]
    assert wsapi(DomainName="ws.example.com").refused == ["a custom domain needs CertificateArn"]


def test_the_outputs_are_what_clients_canaries_and_agents_need() -> None:
    outputs = wsapi(**DOMAIN).outputs
    regional = "<Api>.execute-api.eu-central-1.amazonaws.com"
    assert outputs["WebSocketUrl"] == "wss://ws.example.com/"
    assert outputs["RegionalUrl"] == f"wss://{regional}/<Stage>"
    assert outputs["PushEndpoint"] == f"https://{regional}/<Stage>"
    assert outputs["RegionalDomainName"] == "<Domain.RegionalDomainName>"
    assert outputs["ConnectionStore"] == "dynamodb://<Connections>?region=eu-central-1"
    plain = wsapi()
    assert plain.outputs["WebSocketUrl"] == plain.outputs["RegionalUrl"] == f"wss://{regional}/<Stage>"
    assert not {"RegionalDomainName", "RegionalHostedZoneId"} & set(plain.outputs)
    assert not plain.of_type("AWS::ApiGatewayV2::DomainName")
    environment = plain.properties("HandlerFunction")["Environment"]["Variables"]
    assert environment["WSAPI_ENDPOINT"] == f"https://{regional}/live"


def test_a_local_engine_gets_its_own_addresses_and_no_type_that_it_does_not_know() -> None:
    rendered = wsapi(Endpoint="http://127.0.0.1:4566")
    assert rendered.outputs["WebSocketUrl"] == "ws://127.0.0.1:4566/_aws/execute-api/<Api>/<Stage>"
    assert rendered.outputs["PushEndpoint"] == "http://127.0.0.1:4566/_aws/execute-api/<Api>/<Stage>"
    left_out = {one["Type"] for one in wsapi().resources.values()} - {
        one["Type"] for one in rendered.resources.values()
    }
    assert left_out == {"AWS::ApiGatewayV2::RouteResponse"}
