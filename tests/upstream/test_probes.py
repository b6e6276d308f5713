"""Asking servers for their windows: real servers on loopback, answering with the bytes their kinds send."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from proxy.upstream import Probes, Target, Upstreams, may_answer
from proxy.upstream.probes import FIRST_RETRY, FRESH_SECONDS, LOADING_RETRY, MOST_REQUESTED
from tests.support.probe_fixtures import (
    GROQ,
    INFO,
    KEY,
    LLAMACPP,
    LLAMACPP_NEW,
    LMSTUDIO,
    LMSTUDIO_V0,
    OLLAMA,
    OPENROUTER,
    PROPS,
    PS,
    SGLANG,
    SGLANG_INFO,
    SHOW,
    TGI,
    VLLM,
    Handler,
    ProbedServer,
    SharedAnswers,
    hang,
    opened,
    probed_server,
    serving,
    two_processes,
)
from tests.support.proxy_process import until


@pytest.mark.slow
async def test_a_hanging_server_delays_no_request() -> None:
    """While a server hangs, callers get an answer at once, no second survey starts, and the first ends by itself."""
    async with probed_server({"/v1/models": hang}) as about:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for _ in range(1000):
            assert about.stated_window("m") is None
        assert loop.time() - begun < 1.0
        await until(lambda: bool(about.site.requests))
        about.clock.time += 10 * FRESH_SECONDS
        assert about.stated_window("m") is None
        assert len(about.tasks) == 1
        await about.settle()
        assert about.site.paths == ["/v1/models"]
        assert "no answer" in str(about.probes.last_probes()["up"]["trouble"])


async def test_the_request_of_a_probe() -> None:
    """Probes carry the configured key and headers and our own name, and name only models that the server listed."""
    async with probed_server({"/v1/models": OLLAMA, "/api/ps": PS, "/api/show": SHOW}) as about:
        about.stated_window("a client's invention")
        await about.ask("llama3.2")
        methods = [(method, path) for method, path, _, _ in about.site.requests]
        assert methods == [("GET", "/v1/models"), ("GET", "/api/ps"), ("POST", "/api/show")]
        for _, _, headers, _ in about.site.requests:
            assert headers["authorization"] == f"Bearer {KEY}"
            assert (headers["x-team"], headers["user-agent"]) == ("t", "ullage/test")
        assert json.loads(about.site.requests[-1][3]) == {"model": "llama3.2"}


async def test_answers_are_kept_and_renewed() -> None:
    """One survey answers for all until it is old; then the old answer serves until the new one is here."""
    async with probed_server({"/v1/models": VLLM}) as about:
        assert await about.ask("my-lora") is not None
        about.clock.time += FRESH_SECONDS - 1
        assert await about.ask("my-lora") is not None
        assert len(about.site.requests) == 1
        first = about.probes.window_of("up", "my-lora")
        about.clock.time += 2
        assert await about.ask("my-lora") is not None
        assert len(about.site.requests) == 2
        assert about.probes.window_of("up", "my-lora") is first, "the same words keep their age"
        assert len(about.heard) == 1
        about.site.routes["/v1/models"] = VLLM.replace(b"32768", b"8192")
        about.clock.time += FRESH_SECONDS + 1
        old = about.stated_window("my-lora")
        assert old is not None
        assert old[0] == 32768
        await about.settle()
        renewed = about.probes.window_of("up", "my-lora")
        assert renewed is not None
        assert (renewed.context_window, renewed.since) == (8192, about.clock.time)
        assert about.probes.stated_windows()[0]["age_seconds"] == 0.0


async def test_failures_are_tried_again_ever_later() -> None:
    """A server that fails is probed again after a minute, then ever later; an earlier answer stays in use."""
    async with probed_server({"/v1/models": VLLM}) as about:
        assert await about.ask("my-lora") is not None
        about.site.routes["/v1/models"] = b"nonsense"
        about.clock.time += FRESH_SECONDS + 1
        assert await about.ask("my-lora") is not None
        pauses = []
        for _ in range(6):
            requests, begun = len(about.site.requests), about.clock.time
            while len(about.site.requests) == requests:
                about.clock.time += 1
                assert await about.ask("my-lora") is not None
                assert about.clock.time - begun < 2 * FRESH_SECONDS
            pauses.append(about.clock.time - begun)
        assert pauses[0] == pytest.approx(FIRST_RETRY, rel=0.15)
        assert pauses[1] == pytest.approx(2 * FIRST_RETRY, rel=0.15)
        assert pauses[-1] == pytest.approx(FRESH_SECONDS, rel=0.15)
        assert about.probes.last_probes()["up"]["trouble"] == "an answer that is no JSON"
        about.site.routes["/v1/models"] = VLLM
        about.clock.time += 2 * FRESH_SECONDS
        await about.ask("my-lora")
        assert about.probes.last_probes()["up"]["trouble"] == ""


async def test_a_model_that_is_loading_is_probed_again_soon() -> None:
    """A server that must load the model first is probed again within seconds, not after minutes."""
    async with probed_server({"/v1/models": OLLAMA, "/api/ps": b'{"models":[]}', "/api/show": b"{}"}) as about:
        assert await about.ask("qwen:7b") is None
        about.site.routes["/api/ps"] = PS
        about.clock.time += 1.2 * LOADING_RETRY
        assert await about.ask("qwen:7b") == (8192, None, None, "/api/ps context_length")


async def test_names_of_clients_fill_no_memory() -> None:
    """However many names clients send, few are remembered, and they bring about no further questions."""
    async with probed_server({"/v1/models": VLLM}) as about:
        await about.ask("my-lora")
        for number in range(5 * MOST_REQUESTED):
            assert await about.ask(f"model-{number}") is None
        assert len(about.site.requests) == 1
        assert len(about.probes._servers["up"].requested) <= MOST_REQUESTED
        assert {row["model"] for row in about.probes.stated_windows()} == {"my-lora", "Qwen/Qwen2.5-7B-Instruct"}


async def test_a_server_that_is_not_there() -> None:
    """Nobody listening is a failure in words, and nothing more."""
    async with probed_server({}) as about:
        gone = Upstreams([Target("up", "http://127.0.0.1:1/v1")])
        probes = Probes(
            {"up": "http://127.0.0.1:1/v1"},
            gone.send,
            about.tasks.spawn,
            about.clock,
            "ullage/test",
            on_windows=None,
            records=None,
        )
        await probes.probe_now("up", ["m"])
        assert probes.window_of("up", "m") is None
        assert probes.last_probes()["up"]["trouble"]
        await gone.close()


async def test_only_the_given_upstreams_are_probed() -> None:
    """An upstream that may not be probed never is, nor one of which no window can be learned."""
    async with probed_server({"/v1/models": VLLM}) as about:
        assert about.probes.window_of("another", "m") is None
        await about.probes.probe_now("another", ())
        assert about.probes.window_of("up", "m", False) is None
        await about.settle()
        assert about.site.paths == []
        about.probes.window_of("up", "m", True)
        await about.settle()
        assert about.site.paths == ["/v1/models"]
        assert set(about.probes.windows("up")) == {"my-lora", "Qwen/Qwen2.5-7B-Instruct"}
        assert about.probes.windows("another") == {}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("https://openrouter.ai/api/v1", True),
        ("https://api.groq.com/openai/v1", True),
        ("https://api.openai.com/v1", False),
        ("https://API.OpenAI.com/v1", False),
        ("https://api.anthropic.com", False),
        ("https://me.openai.azure.com/openai", False),
        ("https://bedrock-runtime.us-east-1.amazonaws.com/openai/v1", False),
        ("https://notapi.openai.com.example.org/v1", True),
    ],
)
def test_hosted_apis_that_tell_nothing_are_left_alone(url: str, expected: bool) -> None:
    """Hosts known to have no such route are not bothered; a name that merely looks like one is no such host."""
    assert may_answer(url) is expected


async def test_closing_ends_probes_under_way() -> None:
    """After ``close`` no probe is under way, none begins, and nothing failed."""
    async with probed_server({"/v1/models": hang}) as about:
        about.stated_window("m")
        await until(lambda: bool(about.site.requests))
        await about.probes.close()
        await about.upstream.close()
        assert about.stated_window("m") is None
        await about.settle()
        assert len(about.site.requests) == 1


async def test_the_answer_to_one_process_is_shared() -> None:
    """A second process asks nothing: it has the first one's windows, with their age, until they are old."""
    async with two_processes({"/v1/models": VLLM}) as (first, second):
        window = await first.ask("my-lora")
        assert window is not None
        for each in (first, second):
            each.clock.time += 100
        assert await second.ask("my-lora") == window
        assert first.site.paths == ["/v1/models"]
        assert second.probes.stated_windows()[0]["age_seconds"] == 100.0
        assert second.probes.last_probes()["up"]["age_seconds"] == 100.0
        second.clock.time += FRESH_SECONDS - 101
        await second.ask("my-lora")
        assert first.site.paths == ["/v1/models"], "as old as it may be"
        second.clock.time += 2
        await second.ask("my-lora")
        assert first.site.paths == ["/v1/models"] * 2, "old: asked again, by whoever comes first"
        first.clock.time += FRESH_SECONDS + 1 - 100
        await first.ask("my-lora")
        assert first.site.paths == ["/v1/models"] * 2, "and left for the other"


async def test_a_model_outside_the_shared_answer_is_probed() -> None:
    """A model that the server lists and no process wanted is no part of the shared answer."""
    listed = (
        b'{"object":"list","data":[{"id":"a:latest","object":"model","owned_by":"library"},'
        b'{"id":"b:latest","object":"model","owned_by":"library"}]}'
    )
    shown: list[str] = []

    async def show(request: web.Request) -> web.StreamResponse:
        shown.append((await request.json())["model"])
        return web.json_response({"parameters": "num_ctx 4096", "model_info": {}})

    routes: dict[str, bytes | Handler] = {"/v1/models": listed, "/api/ps": b'{"models":[]}', "/api/show": show}
    async with two_processes(routes) as (first, second):
        assert await first.ask("a") is not None
        assert await second.ask("b") is not None
        assert shown == ["a", "b"]


@pytest.mark.parametrize("value", [b"", b"nonsense", b"\x80", b"\x85\xa2at\xcb"])
async def test_a_spoiled_note_is_no_answer(value: bytes) -> None:
    """If the shared value is not an answer, the server is probed."""
    async with two_processes({"/v1/models": VLLM}) as (first, second):
        window = await first.ask("my-lora")
        shelf = SharedAnswers()
        for name in (f"windows up {first.site.url}/v1",):
            shelf.values[name] = value
        third = ProbedServer(first.site, shelf=shelf)
        async with AsyncExitStack() as stack:
            await opened(stack, third)
            assert await third.ask("my-lora") == window
        assert len(first.site.paths) == 2
        assert second.probes.windows("up") == {}


async def test_a_clock_far_ahead_is_not_believed() -> None:
    """An answer dated in the future, by a clock that is wrong, is not used."""
    async with two_processes({"/v1/models": VLLM}, behind=60.0) as (first, second):
        await first.ask("my-lora")
        assert await second.ask("my-lora") is not None
        assert first.site.paths == ["/v1/models"] * 2


@pytest.mark.parametrize(
    ("routes", "model", "expected"),
    [
        ({"/v1/models": VLLM}, "Qwen/Qwen2.5-7B-Instruct", (32768, None, None, "/v1/models max_model_len")),
        ({"/v1/models": VLLM}, "my-lora", (32768, None, None, "/v1/models max_model_len")),
        ({"/v1/models": VLLM}, "gpt-4o", None),
        ({"/v1/models": SGLANG}, "any name", (262144, None, None, "/v1/models max_model_len")),
        (
            {"/v1/models": SGLANG, "/server_info": SGLANG_INFO},
            "qwen3.6",
            (37081, 37075, None, "/server_info max_total_num_tokens"),
        ),
        (
            {"/v1/models": SGLANG, "/get_server_info": SGLANG_INFO},
            "qwen3.6",
            (37081, 37075, None, "/server_info max_total_num_tokens"),
        ),
        ({"/v1/models": LLAMACPP, "/props": PROPS}, "gpt-4o", (16384, None, None, "/props n_ctx")),
        ({"/props": PROPS}, "gpt-4o", (16384, None, None, "/props n_ctx")),
        ({"/v1/models": LLAMACPP_NEW}, "gpt-4o", (8192, None, None, "/v1/models meta.n_ctx")),
        ({"/v1/models": LLAMACPP}, "/m/L.gguf", None),
        ({"/v1/models": OLLAMA, "/api/ps": PS}, "qwen:7b", (8192, None, None, "/api/ps context_length")),
        (
            {"/v1/models": OLLAMA, "/api/ps": b'{"models":[]}', "/api/show": SHOW},
            "llama3.2",
            (16384, None, None, "/api/show num_ctx"),
        ),
        (
            {"/v1/models": OLLAMA, "/api/ps": PS, "/api/show": SHOW.replace(b"131072", b"2048")},
            "llama3.2",
            (2048, None, None, "/api/show num_ctx"),
        ),
        ({"/v1/models": OLLAMA, "/api/ps": PS, "/api/show": SHOW.replace(b"num_ctx", b"num_abc")}, "llama3.2", None),
        (
            {"/v1/models": LMSTUDIO, "/api/v0/models": LMSTUDIO_V0},
            "llama-3.1-8b",
            (4096, None, None, "/api/v0/models loaded_context_length"),
        ),
        ({"/v1/models": LMSTUDIO, "/api/v0/models": LMSTUDIO_V0}, "qwen2-vl-7b", None),
        ({"/v1/models": TGI, "/info": INFO}, "tgi", (4096, 3072, None, "/info max_total_tokens")),
        (
            {"/info": INFO.replace(b"max_input_tokens", b"max_input_length")},
            "tgi",
            (4096, 3072, None, "/info max_total_tokens"),
        ),
        ({"/v1/models": OPENROUTER}, "openai/gpt-5", (400000, None, 128000, "/v1/models context_length")),
        ({"/v1/models": OPENROUTER}, "x/y", (32768, None, None, "/v1/models top_provider.context_length")),
        ({"/v1/models": GROQ}, "llama-3.3-70b", (131072, None, 32768, "/v1/models context_window")),
    ],
)
async def test_what_each_kind_of_server_tells(
    routes: dict[str, bytes], model: str, expected: tuple[int, int | None, int | None, str] | None
) -> None:
    """Each kind's own bytes give the window a request will really have; what it merely could have is not believed."""
    async with probed_server(routes) as about:
        assert about.stated_window(model) is None, "the first use does not wait"
        assert await about.ask(model) == expected


@pytest.mark.parametrize("base", ["", "/v1", "/api/v1", "/gateway/openai/v1"])
async def test_routes_are_below_the_base_url(base: str) -> None:
    """The list of models stands beside the chat route, native routes beside the version."""
    root = base.removesuffix("/v1")
    async with probed_server({f"{root}/v1/models": LLAMACPP, f"{root}/props": PROPS}, base) as about:
        assert await about.ask("m") == (16384, None, None, "/props n_ctx")
        assert about.site.paths == [f"{root}/v1/models", f"{root}/props"]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"data":{"m":1}}',
        b'{"data":[1,null,{"id":7,"max_model_len":4096},{"max_model_len":4096}]}',
        b'{"data":[{"id":"m","max_model_len":"8192"}]}',
        b'{"data":[{"id":"m","max_model_len":true}]}',
        b'{"data":[{"id":"m","max_model_len":8192.5}]}',
        b'{"data":[{"id":"m","max_model_len":0}]}',
        b'{"data":[{"id":"m","max_model_len":-4096}]}',
        b'{"data":[{"id":"m","max_model_len":3}]}',
        b'{"data":[{"id":"m","max_model_len":99999999999999999999}]}',
        b'{"data":[{"id":"m","top_provider":[],"meta":7,"context_length":{}}]}',
        b'{"data":[{"id":"m","max_model_len":8192}],"pad":"' + b"x" * 2**20 + b'"}',
        b"\xff\xfe",
    ],
)
async def test_a_lying_server_tells_nothing(answer: bytes) -> None:
    """A figure out of range, no JSON, or more than a mebibyte counts as no answer."""
    every = dict.fromkeys(("/v1/models", "/props", "/api/v0/models", "/api/ps", "/info"), answer)
    async with probed_server(every) as about:
        assert await about.ask("m") is None
        assert about.heard == []


async def test_an_endless_answer_is_given_up() -> None:
    """An answer without an end is cut at the limit, long before the deadline."""

    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65_536)

    async with probed_server({"/v1/models": pour}) as about:
        assert await about.ask("m") is None
        assert "bytes" in str(about.probes.last_probes()["up"]["trouble"])


@pytest.mark.slow
async def test_a_hanging_native_route_does_not_hide_the_next() -> None:
    """Of a server whose kind is not known, one route that hangs leaves time for the others."""
    async with probed_server({"/props": hang, "/info": INFO}) as about:
        assert await about.ask("m") == (4096, 3072, None, "/info max_total_tokens")


async def test_redirects_are_not_followed() -> None:
    """A server that points elsewhere is not followed there: its key goes nowhere else."""
    async with serving({"/v1/models": VLLM}) as other:

        async def elsewhere(request: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(f"{other.url}/v1/models")

        async with probed_server({"/v1/models": elsewhere}) as about:
            assert await about.ask("my-lora") is None
        assert other.requests == []


async def test_an_answer_in_an_encoding_is_refused() -> None:
    """A compressed answer that was not requested could inflate to any size: it is not read."""

    async def squeezed(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"\x1f\x8b", headers={"content-encoding": "gzip"})

    async with probed_server({"/v1/models": squeezed}) as about:
        assert await about.ask("m") is None
        assert "encoding" in str(about.probes.last_probes()["up"]["trouble"])
