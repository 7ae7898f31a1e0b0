"""Who may do what where a key is configured."""

from __future__ import annotations

import pytest

from helpers.fake_engine import FakeEngine
from helpers.sessions import Serve, Talk, request, user

KEY = "server-key"


@pytest.fixture
def locked(serve: Serve) -> str:
    return serve(api_key=KEY).url


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearing("wrong"),
        bearing(""),
        bearing(KEY + "x"),
        bearing("schlüssel"),
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Api-Key": KEY},
    ],
)
def test_without_the_key_nothing_opens(locked: str, engine: FakeEngine, headers: dict[str, str]) -> None:
    talk = Talk(locked, key=KEY)
    before = talk.state()
    for method, target in (
        ("POST", f"{locked}/sessions"),
        ("GET", talk.url),
        ("DELETE", talk.url),
        ("POST", f"{talk.url}/samples"),
        ("POST", talk.chat_url),
        ("GET", f"{talk.url}/v1/models"),
        ("POST", f"{talk.url}/flush_cache"),
    ):
        answer = request(target, method, {"messages": [user("u")]} if method == "POST" else None, headers=headers)
        assert answer.status == 401, target
        assert answer.json["type"] == "authentication_error"
        assert answer.error
    assert talk.state() == before
    assert not engine.requests
    assert request(f"{locked}/health").status == 200


def test_the_servers_key_opens_everything(locked: str) -> None:
    talk = Talk(locked, key=KEY)
    talk.ask(user("u"))
    assert talk.samples().samples
    assert talk.delete().status == 204


def test_a_sessions_own_key_opens_its_turns_alone(locked: str, engine: FakeEngine) -> None:
    talk, other = Talk(locked, key=KEY), Talk(locked, key=KEY)
    own = bearing(talk.created["api_key"])
    talk.headers = own
    talk.ask(user("u"))
    assert talk.state()
    assert request(f"{talk.url}/v1/models", headers=own).status == 200
    assert "secret" not in str(engine.requests[-1].headers)
    assert talk.created["api_key"] not in str(engine.requests[0].headers)
    before = talk.state()
    assert talk.delete().status == 403
    assert request(f"{talk.url}/samples", "POST", headers=own).status == 403
    assert talk.state() == before
    assert request(other.url, headers=own).status == 401
    assert request(other.chat_url, "POST", {"messages": [user("u")]}, headers=own).status == 401
    assert request(f"{locked}/sessions", "POST", headers=own).status in (401, 403)


def test_without_a_key_configured_any_will_do(url: str) -> None:
    talk = Talk(url, key="whatever")
    talk.ask(user("u"))
    assert "api_key" not in talk.created
