"""Events in the shapes in which AWS hands them to Lambda: small, and with every part that could mislead a reader."""

from __future__ import annotations

import json
from typing import Any, Final

ACCOUNT: Final = "123456789012"
REGION: Final = "eu-central-1"
BODY: Final = {"order": "7"}

# Over HTTP, all of them this request:
#     POST /orders?tag=a&tag=b%20c&empty=   with   x-part: 1   x-part: 2   cookie: s=1; t=2

_HEADERS: Final = {"content-type": "application/json", "x-part": "2", "cookie": "s=1; t=2"}
_ALL_HEADERS: Final = {"content-type": ["application/json"], "x-part": ["1", "2"], "cookie": ["s=1; t=2"]}
_REST: Final[dict[str, Any]] = {
    "resource": "/{proxy+}",
    "path": "/orders",
    "httpMethod": "POST",
    "headers": _HEADERS,
    "multiValueHeaders": _ALL_HEADERS,
    "queryStringParameters": {"tag": "b c", "empty": ""},
    "multiValueQueryStringParameters": {"tag": ["a", "b c"], "empty": [""]},
    "pathParameters": {"proxy": "orders"},
    "stageVariables": None,
    "requestContext": {
        "accountId": ACCOUNT,
        "apiId": "a1b2c3",
        "path": "/prod/orders",
        "httpMethod": "POST",
        "requestId": "r-1",
        "stage": "prod",
        "identity": {"sourceIp": "192.0.2.1", "userAgent": "curl", "cognitoIdentityId": None},
        "authorizer": {"principalId": "ada"},
    },
    "body": json.dumps(BODY),
    "isBase64Encoded": False,
}
_TWO: Final[dict[str, Any]] = {
    "version": "2.0",
    "routeKey": "ANY /{proxy+}",
    "rawPath": "/orders",
    "rawQueryString": "tag=a&tag=b%20c&empty=",
    "cookies": ["s=1", "t=2"],
    "headers": {"content-type": "application/json", "x-part": "1, 2"},
    "queryStringParameters": {"tag": "a,b c", "empty": ""},
    "pathParameters": {"proxy": "orders"},
    "requestContext": {
        "accountId": ACCOUNT,
        "apiId": "a1b2c3",
        "http": {"method": "POST", "path": "/orders", "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1"},
        "requestId": "r-1",
        "routeKey": "ANY /{proxy+}",
        "stage": "$default",
        "timeEpoch": 1785405600000,
    },
    "body": json.dumps(BODY),
    "isBase64Encoded": False,
}
_BALANCER: Final[dict[str, Any]] = {
    "requestContext": {
        "elb": {
            "targetGroupArn": f"arn:aws:elasticloadbalancing:{REGION}:{ACCOUNT}:targetgroup/orders/6d0ecf831eec9f09"
        }
    },
    "httpMethod": "POST",
    "path": "/orders",
    "body": json.dumps(BODY),
    "isBase64Encoded": False,
}


def _with_context(event: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return event | {"requestContext": event["requestContext"] | changes}


HTTP: Final[dict[str, dict[str, Any]]] = {
    "REST API": _REST,
    "REST API, test in the console": _with_context(_REST, stage="test-invoke-stage", apiId="test"),
    "HTTP API, format 1.0": _with_context(_REST | {"version": "1.0", "path": "/live/orders"}, stage="live"),
    "HTTP API, format 2.0": _TWO,
    "HTTP API, format 2.0, stage and JWT": _with_context(
        _TWO | {"rawPath": "/live/orders"},
        stage="live",
        authorizer={"jwt": {"claims": {"sub": "ada"}, "scopes": None}},
    ),
    "HTTP API, format 2.0, authorizer function": _with_context(_TWO, authorizer={"lambda": {"tenant": "berlin"}}),
    "function URL": _with_context(_TWO | {"routeKey": "$default"}, apiId="url-id", authentication=None),
    "function URL, IAM": _with_context(
        _TWO | {"routeKey": "$default", "pathParameters": None},
        authorizer={"iam": {"accountId": ACCOUNT, "userArn": f"arn:aws:iam::{ACCOUNT}:user/ada"}},
    ),
    "load balancer with lists": _BALANCER
    | {
        "multiValueHeaders": _ALL_HEADERS,
        "multiValueQueryStringParameters": {"tag": ["a", "b%20c"], "empty": [""]},
    },
}

BALANCER: Final[dict[str, Any]] = _BALANCER | {
    "headers": _HEADERS,
    "queryStringParameters": {"tag": "b+c%2Bd", "empty": ""},
}
"""Without lists: of what was sent twice it has the last alone."""

# What looks like HTTP and is none

_ASKED: Final[dict[str, Any]] = {
    "type": "REQUEST",
    "methodArn": f"arn:aws:execute-api:{REGION}:{ACCOUNT}:a1b2c3/prod/POST/orders",
}
_SOCKET: Final[dict[str, Any]] = {
    "routeKey": "$connect",
    "eventType": "CONNECT",
    "connectionId": "L0SM9cOFvHcCIhw=",
    "requestId": "r-1",
    "stage": "prod",
    "apiId": "a1b2c3",
}
AUTHORIZERS: Final[dict[str, dict[str, Any]]] = {
    "TOKEN": {"type": "TOKEN", "authorizationToken": "Bearer x", "methodArn": _ASKED["methodArn"]},
    "REQUEST of a REST API": {name: value for name, value in _REST.items() if name != "body"} | _ASKED,
    "REQUEST of an HTTP API, format 1.0": _REST
    | {"version": "1.0", "type": "REQUEST", "identitySource": "x", "methodArn": _ASKED["methodArn"]},
    "REQUEST of an HTTP API, format 2.0": _TWO
    | {"type": "REQUEST", "identitySource": ["x"], "routeArn": _ASKED["methodArn"]},
    "REQUEST of a WebSocket API": {"requestContext": _SOCKET, "headers": {}} | _ASKED,
}
SOCKETS: Final[dict[str, dict[str, Any]]] = {
    "connect": {"headers": _HEADERS, "multiValueHeaders": _ALL_HEADERS, "requestContext": _SOCKET},
    "message": {
        "requestContext": _SOCKET | {"routeKey": "orders", "eventType": "MESSAGE", "messageId": "m-1"},
        "body": json.dumps(BODY),
        "isBase64Encoded": False,
    },
    "disconnect": {"headers": {}, "requestContext": _SOCKET | {"routeKey": "$disconnect", "eventType": "DISCONNECT"}},
}

# EventBridge


def eventbridge(source: str, detail_type: str, detail: Any, **changes: Any) -> dict[str, Any]:
    """An event of EventBridge."""
    return {
        "version": "0",
        "id": "e-1",
        "detail-type": detail_type,
        "source": source,
        "account": ACCOUNT,
        "time": "2026-07-30T12:00:00Z",
        "region": REGION,
        "resources": [],
        "detail": detail,
        **changes,
    }


SCHEDULER: Final = eventbridge(
    "aws.scheduler",
    "Scheduled Event",
    "{}",
    resources=[f"arn:aws:scheduler:{REGION}:{ACCOUNT}:schedule/default/nightly"],
)
EVENTS: Final[dict[str, dict[str, Any]]] = {
    "rule with a rate": eventbridge("aws.events", "Scheduled Event", {}),
    "EventBridge Scheduler without an input": SCHEDULER,
    "EC2": eventbridge("aws.ec2", "EC2 Instance State-change Notification", {"instance-id": "i-1", "state": "running"}),
    "ECS": eventbridge("aws.ecs", "ECS Task State Change", {"lastStatus": "STOPPED", "containers": []}),
    "an application's own": eventbridge("shop", "OrderPlaced", BODY),
}

# S3


def s3_through_eventbridge(
    detail_type: str = "Object Created", key: str = "in/a b+ü.csv", **changes: Any
) -> dict[str, Any]:
    """What S3 sends to EventBridge, with the key as it is."""
    detail = {
        "version": "0",
        "bucket": {"name": "uploads"},
        "object": {"key": key, "size": 5, "etag": "d41d8", "sequencer": "0062E99A88DC407460", **changes},
        "request-id": "N4N7GDK58NMKJ12R",
        "requester": ACCOUNT,
        "source-ip-address": "192.0.2.1",
        "reason": "PutObject",
    }
    return eventbridge("aws.s3", detail_type, detail, resources=["arn:aws:s3:::uploads"])


def s3_record(name: str = "ObjectCreated:Put", key: str = "in/a+b%2B%C3%BC.csv", **changes: Any) -> dict[str, Any]:
    """What S3 sends to Lambda, with the key as forms encode it."""
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": REGION,
        "eventTime": "2026-07-30T12:00:00.000Z",
        "eventName": name,
        "userIdentity": {"principalId": "AWS:AIDAEXAMPLE"},
        "requestParameters": {"sourceIPAddress": "192.0.2.1"},
        "responseElements": {"x-amz-request-id": "N4N7GDK58NMKJ12R", "x-amz-id-2": "EXAMPLE"},
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "new-uploads",
            "bucket": {"name": "uploads", "ownerIdentity": {"principalId": "A1"}, "arn": "arn:aws:s3:::uploads"},
            "object": {"key": key, "size": 5, "eTag": "d41d8", "sequencer": "0062E99A88DC407460", **changes},
        },
    }


# SQS


def sqs_record(
    body: Any, message_id: str = "m-1", *, group: str | None = None, queue: str = "orders"
) -> dict[str, Any]:
    """A message of a queue, with a group one of a FIFO queue."""
    fifo = {"MessageGroupId": group, "MessageDeduplicationId": message_id, "SequenceNumber": "18849496460467696128"}
    return {
        "messageId": message_id,
        "receiptHandle": "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a",
        "body": body if isinstance(body, str) else json.dumps(body),
        "attributes": {
            "ApproximateReceiveCount": "2",
            "SentTimestamp": "1785412800000",
            "SenderId": "AIDAEXAMPLE",
            "ApproximateFirstReceiveTimestamp": "1785412800001",
            **(fifo if group is not None else {}),
        },
        "messageAttributes": {
            "shop": {"stringValue": "berlin", "stringListValues": [], "binaryListValues": [], "dataType": "String"}
        },
        "md5OfBody": "e4e68fb7bd0e697a0ae8f1bb342846b3",
        "eventSource": "aws:sqs",
        "eventSourceARN": f"arn:aws:sqs:{REGION}:{ACCOUNT}:{queue}",
        "awsRegion": REGION,
    }


# What a router has no kind of route for; `@router.invoke()` takes it

BARE: Final[dict[str, Any]] = {
    "an input of EventBridge Scheduler, Step Functions, or a caller": {"order": "7"},
    "a text": "7",
    "a list, as EventBridge Pipes sends": [sqs_record(BODY)],
    "nothing": {},
    "null": None,
    "DynamoDB": {"Records": [{"eventID": "1", "eventName": "INSERT", "eventSource": "aws:dynamodb", "dynamodb": {}}]},
    "Kinesis": {"Records": [{"kinesis": {"data": "e30="}, "eventSource": "aws:kinesis", "eventID": "shard:1"}]},
    "SES": {"Records": [{"eventSource": "aws:ses", "eventVersion": "1.0", "ses": {"mail": {}, "receipt": {}}}]},
    "CodeCommit": {"Records": [{"eventSource": "aws:codecommit", "codecommit": {"references": []}}]},
    "CloudFront": {"Records": [{"cf": {"config": {}, "request": {"method": "GET", "uri": "/", "headers": {}}}}]},
    "records of two kinds": {"Records": [sqs_record(BODY), s3_record()]},
    "test event of S3": {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "uploads"},
    "CloudWatch Logs": {"awslogs": {"data": "H4sIAAAAAAAA"}},
    "CloudWatch alarm": {"source": "aws.cloudwatch", "alarmArn": "arn:aws:cloudwatch:x", "alarmData": {"state": {}}},
    "Firehose": {"invocationId": "i", "deliveryStreamArn": "arn", "records": [{"recordId": "1", "data": "e30="}]},
    "Kafka": {"eventSource": "aws:kafka", "records": {"topic-0": [{"topic": "topic", "offset": 1, "value": "e30="}]}},
    "MQ": {"eventSource": "aws:mq", "messages": [{"messageID": "1", "data": "e30="}]},
    "Cognito": {"version": "1", "triggerSource": "PreSignUp_SignUp", "request": {"userAttributes": {}}, "response": {}},
    "Config": {"invokingEvent": "{}", "ruleParameters": "{}", "resultToken": "x", "eventLeftScope": False},
    "CloudFormation": {"RequestType": "Create", "ResponseURL": "https://example.com", "ResourceProperties": {}},
    "CodePipeline": {"CodePipeline.job": {"id": "1", "accountId": ACCOUNT, "data": {}}},
    "AppSync": {"arguments": {}, "identity": None, "source": None, "request": {"headers": {}}, "info": {}},
    "S3 Batch Operations": {"invocationSchemaVersion": "1.0", "invocationId": "i", "job": {"id": "1"}, "tasks": []},
    "S3 Object Lambda": {"xAmzRequestId": "r", "getObjectContext": {}, "userRequest": {"url": "/", "headers": {}}},
    "Lex": {"sessionState": {"intent": {}}, "bot": {"name": "x"}, "inputTranscript": "hello"},
    "Connect": {"Name": "ContactFlowEvent", "Details": {"ContactData": {}, "Parameters": {}}},
    "Secrets Manager": {"SecretId": "arn", "ClientRequestToken": "t", "Step": "createSecret"},
    "destination": {
        "version": "1.0",
        "timestamp": "2026-07-30T12:00:00.000Z",
        "requestContext": {"requestId": "r", "functionArn": "arn", "condition": "RetriesExhausted"},
        "requestPayload": BODY,
        "responsePayload": None,
    },
    "VPC Lattice": {"raw_path": "/orders", "method": "POST", "headers": {}, "body": "{}", "is_base64_encoded": False},
    "VPC Lattice, format 2.0": {
        "version": "2.0",
        "path": "/orders",
        "method": "POST",
        "headers": {"content-type": ["application/json"]},
        "requestContext": {"serviceNetworkArn": "arn", "serviceArn": "arn", "region": REGION},
    },
}
