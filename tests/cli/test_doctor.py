"""The doctor, against servers of each kind."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
from typing import Any

import pytest

from proxy.cli.diagnosis import Finding
from proxy.cli.doctor import Diagnosis, examine, is_local_server, show_findings
from proxy.settings import Settings, load
from proxy.upstream.litellm import OFFLINE
from tests.conftest import StartStub
from tests.stub import Fault, Stub
from tests.stub.faults import error
from tests.stub.tokens import request_tokens
from tests.support.forked_ullage import run_ullage
from tests.support.ports import free_port

pytestmark = pytest.mark.slow  # each asks a server until the window is full


def settings(url: str, **upstream: Any) -> Settings:
    return load(None, {("upstreams",): [{"name": "stub", "base_url": url, **upstream}]}, {})


async def seen_by(
    stub: Stub, model: str | None = None, window: int | None = None, key: str = "", oversize: bool = False
) -> Diagnosis:
    given: dict[tuple[str, ...], object] = {("upstreams",): [{"name": "stub", "base_url": stub.url}]}
    if window is not None:
        given["models", "*", "context_window"] = window
    return await examine(load(None, given, {}), model, key=key, oversize=oversize, seconds=30)


def levels(result: Diagnosis) -> dict[str, str]:
    """The level of each topic; of several the last one."""
    return {finding.topic: finding.level for finding in result.findings}


async def test_an_honest_server(stub: StartStub) -> None:
    """Window, usage, streams and overflow are all well, with our count equal to the server's, and four requests."""
    server = await stub(windows={"house-model": 8_192}, tells=True)
    result = await seen_by(server)
    assert result.healthy
    assert result.model == "house-model"
    assert set(levels(result).values()) == {"ok"}, result.findings
    assert list(levels(result)) == ["models", "window", "answers", "usage", "stream", "overflow", "limit"]
    chats = server.chats()
    assert [seen.verdict for seen in chats] == ["ok", "ok", "overflow"]
    assert all(seen.parsed["max_tokens"] == 1 for seen in chats)
    assert result.sent == sum(request_tokens(seen.parsed) for seen in chats)


async def test_a_server_that_truncates(stub: StartStub) -> None:
    """A silent cut is an error, with what was read and what to do."""
    server = await stub(windows={"house-model": 8_192}, tells=True, truncates=True)
    result = await seen_by(server)
    assert not result.healthy
    assert levels(result)["overflow"] == "error"
    text = result.findings[-1]
    assert "without a word" in text.text
    assert "context" in text.remedy


async def test_a_server_whose_window_nobody_knows(stub: StartStub) -> None:
    """Longer and longer requests find the limit; the error that states it is compared with nothing."""
    server = await stub(windows={"house-model": 20_000})
    result = await seen_by(server)
    assert levels(result)["window"] == "warning"
    assert levels(result)["limit"] == "ok"
    assert "20,000" in result.findings[-1].text
    assert [seen.verdict for seen in server.chats()] == ["ok", "ok", "ok", "overflow"]


async def test_another_tokenizer(stub: StartStub) -> None:
    """A server that counts half as much again is reported as such, and the long request is judged by its own count."""
    server = await stub(windows={"house-model": 8_192}, tells=True, factor=1.5)
    result = await seen_by(server)
    assert levels(result)["usage"] == "info"
    assert levels(result)["overflow"] == levels(result)["limit"] == "ok"
    assert result.healthy


async def test_a_server_with_less_than_was_configured(stub: StartStub) -> None:
    """A stated limit under the configured window is a warning that gives the figure to write."""
    server = await stub(windows={"house-model": 8_192})
    result = await seen_by(server, window=16_384)
    limit = result.findings[-1]
    assert (limit.topic, limit.level, limit.remedy) == ("limit", "warning", "Set context_window: 8192.")


async def test_an_error_nobody_recognises(stub: StartStub) -> None:
    """It is shown, and stands in the way."""
    server = await stub(windows={"house-model": 8_192}, tells=True)
    server.fail(Fault())
    server.fail(Fault(), times=2)
    server.fail(error(400, "The quantity of glyphs displeases the oracle.", "oracle_displeased"))
    result = await seen_by(server)
    assert not result.healthy
    assert "displeases the oracle" in result.findings[-1].text


async def test_a_server_without_usage(stub: StartStub) -> None:
    """A warning says that the count cannot be corrected, whole and streamed."""
    server = await stub(windows={"house-model": 8_192}, tells=True)
    bare = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]}).encode()
    server.fail(Fault())
    server.fail(Fault(status=200, headers=(("content-type", "application/json"),), body=bare), times=2)
    result = await seen_by(server)
    assert levels(result)["usage"] == levels(result)["stream"] == "warning"
    assert result.healthy


async def test_nothing_is_billed_unasked(stub: StartStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a server elsewhere the long request waits for a yes, and its size is reported."""
    server = await stub(windows={"house-model": 8_192}, tells=True)
    monkeypatch.setattr("proxy.cli.doctor.is_local_server", lambda url: False)
    result = await seen_by(server)
    assert [seen.verdict for seen in server.chats()] == ["ok", "ok"]
    assert levels(result)["overflow"] == "info"
    assert "--yes" in result.findings[-1].remedy
    result = await seen_by(server, oversize=True)
    assert levels(result)["overflow"] == "ok"


async def test_keys_and_models(stub: StartStub) -> None:
    """A key is sent as the upstream's own; without a needed one, or for an unknown model, the remedy names the flag."""
    server = await stub(windows={"house-model": 8_192}, tells=True)
    await examine(settings(server.url), "house-model", key="sk-CANARY", seconds=30, oversize=False)
    assert {seen.header("authorization") for seen in server.seen} == {"Bearer sk-CANARY"}
    server.forget()
    server.fail(error(401, "no key"))
    result = await examine(settings(server.url), None, seconds=30, key="", oversize=False)
    assert "--key-env" in result.findings[-1].remedy
    server.forget()
    server.fail(Fault())
    server.fail(error(404, "no such model"))
    result = await examine(settings(server.url), "no-such", seconds=30, key="", oversize=False)
    assert levels(result) == {"models": "warning", "window": "warning", "answers": "error"}


async def test_nobody_there() -> None:
    """A server that cannot be reached is one error."""
    result = await examine(settings(f"http://127.0.0.1:{free_port()}/v1"), None, seconds=10, key="", oversize=False)
    assert [(f.topic, f.level) for f in result.findings] == [("reachable", "error")]


async def test_a_model_that_wants_the_newer_name(stub: StartStub) -> None:
    """If max_tokens is refused by name, max_completion_tokens is used from then on."""
    server = await stub(windows={"house-model": 8_192}, tells=True)
    server.fail(Fault())
    server.fail(error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."))
    result = await seen_by(server)
    assert result.healthy
    assert all("max_completion_tokens" in seen.parsed for seen in server.chats("ok"))


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://127.0.0.1:1/v1", True),
        ("http://[::1]:1/v1", True),
        ("http://localhost/v1", True),
        ("http://10.0.0.7/v1", True),
        ("http://vllm:8000/v1", True),
        ("http://mac.local/v1", True),
        ("https://api.openai.com/v1", False),
        ("", False),
        ("http://8.8.8.8/v1", False),
    ],
)
def test_what_is_local(url: str, near: bool) -> None:
    """Addresses of this machine and of private networks are near, names of the internet are not."""
    assert is_local_server(url) is near


@pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning")
@pytest.mark.timeout(600)
async def test_a_provider_that_is_bridged(stub: StartStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider behind LiteLLM is examined through it, by the model's own name; no list of models is no obstacle."""
    server = await stub(windows={"claude-3-haiku": 8_192}, wording="anthropic")
    given = settings(server.url, provider="anthropic", api_key="sk-x")
    alias = given.model_validate({**given.model_dump(), "models": [{"name": "fast", "model": "claude-3-haiku"}]})
    # The first request waits for the import of LiteLLM, which takes seconds of CPU and minutes on a busy machine.
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    await asyncio.to_thread(importlib.import_module, "litellm")
    result = await examine(alias, "fast", seconds=120, key="", oversize=False)
    assert result.model == "claude-3-haiku"
    assert {seen.path for seen in server.chats()} == {"/v1/messages"}
    assert levels(result)["answers"] == levels(result)["usage"] == levels(result)["overflow"] == "ok"
    unreachable = load(None, {("upstreams",): [{"name": "stub", "provider": "gemini", "api_key": "sk-x"}]}, {})
    assert levels(await examine(unreachable, None, key="", oversize=False, seconds=120.0))["models"] == "error"


async def test_the_command(stub: StartStub) -> None:
    """The command prints findings or JSON, and exits 0 for a healthy server and 1 for one that cuts."""
    server = await stub(windows={"house-model": 8_192}, tells=True)

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return run_ullage("doctor", "--upstream", server.url, *flags)

    ran = await asyncio.to_thread(run)
    assert ran.returncode == 0, ran.stderr
    assert "house-model at http://" in ran.stdout
    assert "8,192 tokens, by server: /v1/models max_model_len" in ran.stdout
    server.rules = type(server.rules)(window=8_192, windows={"house-model": 8_192}, tells=True, truncates=True)
    ran = await asyncio.to_thread(run, "--json")
    assert ran.returncode == 1
    result = json.loads(ran.stdout)
    assert result["healthy"] is False
    assert [each["level"] for each in result["findings"]].count("error") == 1
    ran = await asyncio.to_thread(run, "--key-env", "ULLAGE_NO_SUCH_VARIABLE")
    assert ran.returncode == 2


def test_findings_are_shown_with_their_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a model may hold brackets; a remedy stands under its finding."""
    findings = (Finding("window", "ok", "8,192 tokens"), Finding("usage", "error", "none [at all]", "Turn it on."))
    show_findings(Diagnosis("up", "http://127.0.0.1:1/[v1]", "[m]", findings, 1_200))
    shown = capsys.readouterr().out
    assert shown.startswith("[m] at http://127.0.0.1:1/[v1]\n")
    assert "none [at all]" in shown
    assert shown.index("Turn it on.") > shown.index("none [at all]")
    assert shown.endswith("1,200 tokens were sent, by our count.\n")
