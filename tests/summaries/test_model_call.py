"""One call: whose key goes where, and what counts as an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.request import Origin
from proxy.summaries.model_call import (
    CallFailed,
    Summariser,
    call_headers,
    call_model,
    call_path,
    credentials,
    is_subscription_key,
)
from proxy.upstream import Target, Upstreams
from tests.conftest import StartStub
from tests.stub.summariser import Behaviour

HEADERS = (
    ("Authorization", "Bearer sk-abc"),
    ("OpenAI-Organization", "org"),
    ("Idempotency-Key", "once"),
    ("User-Agent", "client/1"),
    ("X-Stainless-Lang", "python"),
    ("traceparent", "00-1"),
)
ORIGIN = Origin("/v1/chat/completions?api-version=1", HEADERS)
OWN = Summariser(
    "stub", "gpt-4o-mini", "chat", 8192, is_request_model=True, uses_client_headers=True, encoding="o200k_base"
)
BODY = b'{"model":"gpt-4o-mini","messages":[{"role":"user","content":"| Note 1: it is 9401."}]}'
AGENT = "ullage/1 (summary)"


def test_what_belongs_to_the_clients_own_request_stays_with_it() -> None:
    """Credentials and account headers go along; idempotency keys, traces and the client's name do not."""
    sent = dict(call_headers(ORIGIN, AGENT, uses_client_headers=True))
    assert sent["Authorization"] == "Bearer sk-abc"
    assert sent["OpenAI-Organization"] == "org"
    assert sent["User-Agent"] == AGENT
    assert not {"Idempotency-Key", "X-Stainless-Lang", "traceparent"} & sent.keys()


def test_another_upstream_gets_nothing_of_the_callers() -> None:
    """A call to another upstream carries none of the request's headers."""
    assert {name for name, _ in call_headers(ORIGIN, AGENT, uses_client_headers=False)} == {
        "Content-Type", "Accept", "Accept-Encoding", "User-Agent"
    }  # fmt: skip


@pytest.mark.parametrize(
    "key", ["Bearer sk-ant-oat01-x", "sk-ant-oat01-x", "Bearer eyJhbGciOiJSUzI1NiJ9.eyJzdWIi.c2ln"]
)
def test_subscription_tokens_are_recognised(key: str) -> None:
    """OAuth tokens and JWTs, with and without a scheme."""
    assert is_subscription_key(key)


@pytest.mark.parametrize("key", ["Bearer sk-proj-abc", "sk-ant-api03-abc", "", "Bearer", "gsk_eyJ", "eyJ.no"])
def test_ordinary_keys_are_not(key: str) -> None:
    """API keys of providers pass."""
    assert not is_subscription_key(key)


def test_the_key_is_in_no_representation() -> None:
    """An origin does not show its headers."""
    assert "sk-abc" not in repr(ORIGIN)
    assert credentials(HEADERS) == ["Bearer sk-abc"]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/chat/completions?a=b", "/v1/chat/completions?a=b"),
        ("/openai/deployments/mine/chat/completions?a=b", "/openai/deployments/gpt-4o%2Fx/chat/completions?a=b"),
    ],
)
def test_a_path_that_names_the_model_names_the_summariser(path: str, sent: str) -> None:
    """A configured summariser is asked on the request's path, under its own name where the path has one."""
    configured = replace(OWN, model="gpt-4o/x", is_request_model=False)
    assert call_path(configured, Origin(path, ())) == sent
    assert call_path(OWN, Origin(path, ())) == path
    assert call_path(replace(configured, uses_client_headers=False), Origin(path, ())) == "/v1/chat/completions"


async def test_a_call_goes_the_way_its_request_went(stub: StartStub) -> None:
    """The request's own path and query are used, with the model's headers, and text and tokens come back."""
    server = await stub()
    upstream = Upstreams([Target("stub", server.url)])
    added = {"X-Team": "a", "OpenAI-Organization": "configured"}
    written = await call_model(upstream, replace(OWN, configured_headers=added), ORIGIN, AGENT, BODY, 5.0)
    await upstream.close()
    assert "Note 1: it is 9401." in written.text
    assert written.usage.input_tokens
    (seen,) = server.summaries
    assert seen.query == "api-version=1"
    assert seen.header("x-team") == "a"
    assert [value for name, value in seen.headers if name.lower() == "openai-organization"] == ["configured"]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("failing", "refused"), ("limited", "limited"), ("calling", "called_tools"), ("hanging", "timeout")],
)
async def test_what_goes_wrong_has_a_name(stub: StartStub, behaviour: Behaviour, reason: str) -> None:
    """Errors, limits, tool calls and silence are told apart."""
    server = await stub()
    server.summariser = behaviour
    upstream = Upstreams([Target("stub", server.url)])
    with pytest.raises(CallFailed) as failed:
        await call_model(upstream, OWN, ORIGIN, AGENT, BODY, 0.2 if behaviour == "hanging" else 5.0)
    await upstream.close()
    assert failed.value.reason == reason
    assert failed.value.limited is (behaviour == "limited")


async def test_an_upstream_that_is_not_there_is_unreachable() -> None:
    """A refused connection is a failure like any other."""
    upstream = Upstreams([Target("stub", "http://127.0.0.1:9/v1")])
    with pytest.raises(CallFailed, match="unreachable"):
        await call_model(upstream, OWN, ORIGIN, AGENT, BODY, 10.0)
    await upstream.close()
