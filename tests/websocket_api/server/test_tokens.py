"""Who may connect: tokens, the keys of their issuer, and the authorizer as API Gateway calls it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from thunderagent.model.bus import Event, EventBus
from thunderagent.model.edge_events import ConnectionRefused
from thunderagent.model.errors import ConfigurationError
from thunderagent.testing import FakeClock
from thunderagent.websocket_api.gateway.events import METHOD_ARN, connect_event
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.server import keys as keys_module
from thunderagent.websocket_api.server.authorizer import Authorizer, Unauthorized
from thunderagent.websocket_api.server.keys import (
    MAX_AGE_S,
    REFETCH_S,
    RETRY_S,
    STALE_S,
    Keys,
    KeysUnavailable,
    fetch_url,
    read_jwks,
)
from thunderagent.websocket_api.server.tokens import Identity, TokenRefused, UserRefused, Verifier


@pytest.fixture(scope="module")
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="module")
def issuer(clock: FakeClock) -> Issuer:
    return Issuer(now=clock.now)


@pytest.fixture(scope="module")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def rsa_jwks(key: rsa.RSAPrivateKey, **changes: Any) -> str:
    jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    return json.dumps({"keys": [{**jwk, "kid": "r1", **changes}]})


def part(data: Any) -> str:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_a_good_token_tells_its_user(issuer: Issuer, clock: FakeClock) -> None:
    assert issuer.verifier().verify(issuer.token("ada")) == Identity("ada", clock.now() + 3600)


@pytest.mark.parametrize("algorithm", ["RS256", "RS512", "PS256"])
def test_tokens_of_an_rsa_key_count(
    rsa_key: rsa.RSAPrivateKey, issuer: Issuer, clock: FakeClock, algorithm: str
) -> None:
    keys = Keys(lambda: rsa_jwks(rsa_key))
    claims = {"iss": "i", "aud": ["other", "a"], "sub": "ada", "exp": clock.now() + 60}
    token = jwt.encode(claims, rsa_key, algorithm=algorithm, headers={"kid": "r1"})
    verifier = Verifier(keys, issuer="i", audience="a", now=clock.now)
    assert verifier.verify(token).user == "ada"


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"iss": "https://other.example/"}, "issuer"),
        ({"iss": None}, "iss"),
        ({"aud": "other"}, "udience"),
        ({"aud": None}, "aud"),
        ({"sub": None}, "sub"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "exp"),
        ({"exp": True}, "exp"),
        ({"exp": float("inf")}, "exp"),
        ({"nbf": 1_800_000_000 + 60}, "counts only in 60 s"),
        ({"nbf": "x"}, "nbf"),
    ],
)
def test_a_token_with_wrong_claims_does_not_count(issuer: Issuer, claims: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenRefused, match=says):
        issuer.verifier().verify(issuer.token("ada", **claims))


def test_a_token_is_over_30_s_after_its_time_and_counts_30_s_before(issuer: Issuer) -> None:
    verifier = issuer.verifier()
    assert verifier.verify(issuer.token("ada", expires_s=-29)).user == "ada"
    with pytest.raises(TokenRefused, match="over since 30 s"):
        verifier.verify(issuer.token("ada", expires_s=-30))
    assert verifier.verify(issuer.token("ada", nbf=1_800_000_000 + 30)).user == "ada"


@pytest.mark.parametrize("user", ["ada", "auth0|5f7c8ec7c33c6c004bbafe82", "a@b.example", "x" * 128, "eu:7/8=9+0~-_."])
def test_users_of_common_issuers_are_taken(issuer: Issuer, user: str) -> None:
    assert issuer.verifier().verify(issuer.token(user)).user == user


@pytest.mark.parametrize("user", ["", " ada", "ada\n", "x" * 129, "ädä", "a b", "#", "a\x00", "|a"])
def test_a_sub_that_is_no_user_id_is_refused(issuer: Issuer, user: str) -> None:
    with pytest.raises(UserRefused, match="1 to 128"):
        issuer.verifier().verify(issuer.token(user))


@pytest.mark.parametrize(
    "token", ["", "x", "a.b", "a.b.c", "..", "é", "x" * 9000, part({"alg": "ES256"}) + "..", "{}.{}.{}"]
)
def test_what_is_no_token_does_not_count(issuer: Issuer, token: str) -> None:
    with pytest.raises(TokenRefused):
        issuer.verifier().verify(token)


def test_a_token_without_a_signature_does_not_count(issuer: Issuer, clock: FakeClock) -> None:
    claims = {"iss": issuer.issuer, "aud": issuer.audience, "sub": "ada", "exp": clock.now() + 60}
    for algorithm in ("none", "None", "NONE", None, 7, ["ES256"]):
        with pytest.raises(TokenRefused):
            issuer.verifier().verify(f"{part({'alg': algorithm, 'typ': 'JWT'})}.{part(claims)}.")


def test_a_token_signed_with_the_public_key_as_a_secret_does_not_count(
    rsa_key: rsa.RSAPrivateKey, clock: FakeClock
) -> None:
    public = rsa_key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    claims = {"iss": "i", "aud": "a", "sub": "ada", "exp": clock.now() + 60}
    signed = f"{part({'alg': 'HS256', 'kid': 'r1'})}.{part(claims)}"
    token = f"{signed}.{part(hmac.new(public, signed.encode(), hashlib.sha256).digest())}"
    with pytest.raises(TokenRefused, match="'HS256'"):
        Verifier(Keys(lambda: rsa_jwks(rsa_key)), issuer="i", audience="a", now=clock.now).verify(token)


def test_a_token_of_another_key_or_with_a_changed_user_does_not_count(issuer: Issuer, clock: FakeClock) -> None:
    with pytest.raises(TokenRefused, match="no key"):
        issuer.verifier().verify(Issuer(now=clock.now).token("ada"))
    head, claims, signature = issuer.token("ada").split(".")
    changed = json.loads(base64.urlsafe_b64decode(claims + "==")) | {"sub": "eve"}
    with pytest.raises(TokenRefused, match="ignature"):
        issuer.verifier().verify(f"{head}.{part(changed)}.{signature}")


def test_a_token_of_an_rsa_key_that_is_too_short_does_not_count(rsa_key: rsa.RSAPrivateKey, clock: FakeClock) -> None:
    short = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 - that is the point
    claims = {"iss": "i", "aud": "a", "sub": "ada", "exp": clock.now() + 60}
    with warnings.catch_warnings(action="ignore"):  # PyJWT warns of the key that the test signs with
        token = jwt.encode(claims, short, algorithm="RS256", headers={"kid": "r1"})
    jwks = json.dumps(
        {"keys": [*json.loads(rsa_jwks(short))["keys"], *json.loads(rsa_jwks(rsa_key, kid="r2"))["keys"]]}
    )
    verifier = Verifier(Keys(lambda: jwks), issuer="i", audience="a", now=clock.now)
    with pytest.raises(TokenRefused, match="'r1' has 1024 bits: let the issuer sign with one of 2048 bits or more"):
        verifier.verify(token)
    good = jwt.encode(claims, rsa_key, algorithm="RS256", headers={"kid": "r2"})
    assert verifier.verify(good).user == "ada"  # a weak key beside it does no harm


def test_a_key_is_for_its_algorithm_only(rsa_key: rsa.RSAPrivateKey, clock: FakeClock) -> None:
    claims = {"iss": "i", "aud": "a", "sub": "ada", "exp": clock.now() + 60}
    token = jwt.encode(claims, rsa_key, algorithm="RS256", headers={"kid": "r1"})
    keys = Keys(lambda: rsa_jwks(rsa_key, alg="PS256"))
    with pytest.raises(TokenRefused, match="for PS256"):
        Verifier(keys, issuer="i", audience="a", now=clock.now).verify(token)
    mixed = f"{part({'alg': 'ES256', 'kid': 'r1'})}.{token.partition('.')[2]}"
    with pytest.raises(TokenRefused):
        Verifier(Keys(lambda: rsa_jwks(rsa_key)), issuer="i", audience="a", now=clock.now).verify(mixed)


def test_a_token_without_the_name_of_its_key_counts_if_there_is_one_key(
    rsa_key: rsa.RSAPrivateKey, clock: FakeClock
) -> None:
    token = jwt.encode({"iss": "i", "aud": "a", "sub": "ada", "exp": clock.now() + 60}, rsa_key, algorithm="RS256")
    one = rsa_jwks(rsa_key)
    assert Verifier(Keys(lambda: one), issuer="i", audience="a", now=clock.now).verify(token).user == "ada"
    two = json.dumps({"keys": json.loads(one)["keys"] * 2})
    with pytest.raises(TokenRefused, match="no key"):
        Verifier(Keys(lambda: two), issuer="i", audience="a", now=clock.now).verify(token)


def test_issuer_and_audience_must_be_given() -> None:
    for issuer, audience in (("", "a"), ("i", "")):
        with pytest.raises(ConfigurationError, match="made for others"):
            Verifier(Keys(lambda: ""), issuer=issuer, audience=audience)


# Keys


class Fetching:
    """Counts reads of a JWKS, and answers what it is told to."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.reads = 0
        self.error: Exception | None = None

    def __call__(self) -> str:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return json.dumps({"keys": [{"kty": "EC", "kid": name} for name in self.names]})


def test_keys_are_read_once_and_again_when_they_are_old() -> None:
    clock, fetch = FakeClock(), Fetching("a")
    keys = Keys(fetch, monotonic=clock.monotonic)
    for _ in range(3):
        assert keys.find("a") == {"kty": "EC", "kid": "a"}
    clock.advance(MAX_AGE_S - 1)
    keys.find("a")
    assert fetch.reads == 1
    clock.advance(2.0)
    keys.find("a")
    assert fetch.reads == 2


def test_an_unknown_key_is_looked_for_once_in_30_s() -> None:
    clock, fetch = FakeClock(), Fetching("a")
    keys = Keys(fetch, monotonic=clock.monotonic)
    keys.find("a")
    clock.advance(REFETCH_S)
    fetch.names = ("a", "b")
    assert keys.find("b") is not None
    assert fetch.reads == 2
    for _ in range(100):
        assert keys.find("forged") is None
    assert fetch.reads == 2
    clock.advance(REFETCH_S)
    assert keys.find("forged") is None
    assert fetch.reads == 3


def test_old_keys_count_for_an_hour_while_the_issuer_is_away_and_then_nobody_can_connect() -> None:
    clock, fetch = FakeClock(), Fetching("a")
    keys = Keys(fetch, monotonic=clock.monotonic)
    keys.find("a")
    fetch.error = OSError("away")
    for _ in range(5):
        clock.advance(MAX_AGE_S + 1)
        assert keys.find("a") is not None
    assert fetch.reads == 6
    clock.advance(STALE_S)
    with pytest.raises(KeysUnavailable, match="away"):
        keys.find("a")
    fetch.error = None
    clock.advance(RETRY_S)
    assert keys.find("a") is not None


def test_keys_that_cannot_be_read_at_first_are_tried_again_soon_and_not_for_each_token() -> None:
    clock, fetch = FakeClock(), Fetching("a")
    fetch.error = OSError("away")
    keys = Keys(fetch, monotonic=clock.monotonic)
    for _ in range(10):
        with pytest.raises(KeysUnavailable):
            keys.find("a")
    assert fetch.reads == 1
    fetch.error = None
    clock.advance(RETRY_S)
    assert keys.find("a") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        ("[]", "no list"),
        ('{"keys": {}}', "no list"),
        ('{"keys": []}', "no public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}, 7]}', "no public key"),
        ('{"keys": [{"kty": "RSA", "use": "enc"}]}', "no public key"),
    ],
)
def test_what_is_no_jwks_is_told(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_jwks(text)


@contextmanager
def jwks_server(answer: Any) -> Iterator[str]:
    """A server of one answer on the loopback address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/jwks.json"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def send(body: bytes, status: int = 200, **headers: str) -> Any:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.mark.slow
def test_keys_are_read_from_a_url(issuer: Issuer) -> None:
    with jwks_server(send(issuer.jwks.encode())) as url:
        verifier = Verifier(Keys(fetch_url(url)), issuer=issuer.issuer, audience=issuer.audience, now=lambda: 1.8e9)
        assert verifier.verify(issuer.token("ada")).user == "ada"


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        send(b"no", 500),
        send(b"x" * (keys_module.MOST_BYTES + 1)),
        send(b"\xff"),
    ],
)
def test_an_issuer_that_answers_nonsense_is_told(answer: Any) -> None:
    with jwks_server(answer) as url, pytest.raises(KeysUnavailable):
        Keys(fetch_url(url)).find("a")


@pytest.mark.slow
def test_an_issuer_that_sends_elsewhere_is_not_followed(issuer: Issuer) -> None:
    with (
        jwks_server(send(issuer.jwks.encode())) as elsewhere,
        jwks_server(send(b"", 302, Location=elsewhere)) as url,
        pytest.raises(KeysUnavailable, match="302"),
    ):
        Keys(fetch_url(url)).find(None)


@pytest.mark.slow
def test_an_issuer_that_answers_a_letter_at_a_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, over = FakeClock(), threading.Event()

    def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(b" ")
                clock.advance(0.5)
                if over.wait(0.005):
                    return
        except OSError:
            pass

    with jwks_server(drip) as url:
        with pytest.raises(KeysUnavailable, match="within 4 s"):
            Keys(fetch_url(url, monotonic=clock.monotonic)).find("a")
        over.set()


@pytest.mark.parametrize("url", ["http://issuer.example/jwks", "ftp://x", "file:///etc/passwd", "https://", "x"])
def test_keys_are_not_read_where_others_could_change_them(url: str) -> None:
    with pytest.raises(ConfigurationError, match="https"):
        fetch_url(url)


# The authorizer


class Door:
    """An authorizer and what it told."""

    def __init__(self, issuer: Issuer, **options: Any) -> None:
        bus = EventBus()
        self.told: list[Event] = []
        bus.subscribe(self.told.append)
        self.authorizer = Authorizer(issuer.verifier(), bus=bus, **options)

    def ask(self, path: str = "/", **headers: str) -> dict[str, Any]:
        return self.authorizer.authorize(connect_event("c1", path, headers, now=0.0))

    @property
    def reasons(self) -> list[tuple[int, str]]:
        return [(one.status, one.reason) for one in self.told if isinstance(one, ConnectionRefused)]


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer {}"},
        {"authorization": "bearer   {} "},
        {"Sec-WebSocket-Protocol": "thunderagent.v1, bearer.{}"},
        {"sec-websocket-protocol": "bearer.{},thunderagent.v1"},
    ],
)
def test_a_token_in_a_header_or_a_subprotocol_lets_its_user_connect(issuer: Issuer, headers: dict[str, str]) -> None:
    token = issuer.token("ada")
    answer = Door(issuer).ask(**{name: value.format(token) for name, value in headers.items()})
    assert answer["principalId"] == "ada"
    assert answer["policyDocument"] == {
        "Version": "2012-10-17",
        "Statement": [{"Action": "execute-api:Invoke", "Effect": "Allow", "Resource": METHOD_ARN}],
    }
    assert answer["context"] == {"user": "ada", "expires": "1800003600"}
    assert len(json.dumps(answer)) < 8192


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Basic YTpi"},
     {"Sec-WebSocket-Protocol": "thunderagent.v1"}, {"Sec-WebSocket-Protocol": "bearer."}],
)  # fmt: skip
def test_without_a_token_nobody_connects_and_the_reason_is_told(issuer: Issuer, headers: dict[str, str]) -> None:
    door = Door(issuer)
    with pytest.raises(Unauthorized) as caught:
        door.ask(**headers)
    assert str(caught.value) == "Unauthorized"  # the text that API Gateway turns into a 401
    [(status, reason)] = door.reasons
    assert status == 401
    assert "there is no token" in reason


def test_a_token_in_the_query_string_is_refused_with_the_reason_unless_it_is_allowed(issuer: Issuer) -> None:
    door, token = Door(issuer), issuer.token("ada")
    for name in ("token", "access_token"):
        with pytest.raises(Unauthorized):
            door.ask(f"/?{name}={token}")
        assert "ends up in logs" in door.reasons[-1][1]
        assert Door(issuer, query_token=True).ask(f"/?{name}={token}")["principalId"] == "ada"


def test_a_header_counts_before_the_query_string(issuer: Issuer) -> None:
    answer = Door(issuer).ask(f"/?token={issuer.token('eve')}", Authorization=f"Bearer {issuer.token('ada')}")
    assert answer["principalId"] == "ada"


def test_a_good_token_of_a_user_that_cannot_be_one_is_denied(issuer: Issuer) -> None:
    door = Door(issuer)
    answer = door.ask(Authorization=f"Bearer {issuer.token('a b')}")
    assert answer["policyDocument"]["Statement"][0]["Effect"] == "Deny"
    assert door.reasons[0][0] == 403


def test_no_reason_contains_the_token(issuer: Issuer) -> None:
    door = Door(issuer)
    for token in (
        issuer.token("ada", expires_s=-100),
        issuer.token("ada") + "x",
        "geheim",
        issuer.token("ada", aud="x"),
    ):
        with pytest.raises(Unauthorized) as caught:
            door.ask(f"/?token={token}", Authorization=f"Bearer {token}")
        assert all(token not in reason for _, reason in door.reasons)
        assert all(piece not in repr(door.told) for piece in token.split("."))
        assert caught.value.__cause__ is None
    assert len(door.reasons) == 4


def test_an_issuer_that_is_away_is_no_fault_of_the_token(issuer: Issuer) -> None:
    def fetch() -> str:
        raise OSError("away")

    door = Door(issuer)
    verifier = Verifier(Keys(fetch), issuer=issuer.issuer, audience=issuer.audience)
    door.authorizer = Authorizer(verifier, bus=door.authorizer.bus)
    with pytest.raises(KeysUnavailable):
        door.ask(Authorization=f"Bearer {issuer.token('ada')}")
    assert door.reasons == [(500, "the keys of the issuer of tokens cannot be read: away")]
