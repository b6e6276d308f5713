"""One survey of a server: what each kind of it says, and what is made of answers that are none."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.support.probe_fixtures import (
    GROQ,
    INFO,
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
    hang,
    rig,
    serving,
)


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
    async with rig(routes) as about:
        assert about.told(model) is None, "the first use does not wait"
        assert await about.ask(model) == expected


@pytest.mark.parametrize("base", ["", "/v1", "/api/v1", "/gateway/openai/v1"])
async def test_routes_are_below_the_base_url(base: str) -> None:
    """The list of models is asked for beside the chat route, native routes beside the version."""
    root = base.removesuffix("/v1")
    async with rig({f"{root}/v1/models": LLAMACPP, f"{root}/props": PROPS}, base) as about:
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
    """What is no sane figure, no JSON or more than a mebibyte is as if the server had said nothing."""
    every = dict.fromkeys(("/v1/models", "/props", "/api/v0/models", "/api/ps", "/info"), answer)
    async with rig(every) as about:
        assert await about.ask("m") is None
        assert about.heard == []


async def test_an_endless_answer_is_given_up() -> None:
    """An answer without an end is cut at the limit, long before the deadline."""

    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65_536)

    async with rig({"/v1/models": pour}) as about:
        assert await about.ask("m") is None
        assert "bytes" in str(about.probes.surveys()["up"]["trouble"])


async def test_a_hanging_native_route_does_not_hide_the_next() -> None:
    """Of a server whose kind is not known, one route that hangs leaves time for the others."""
    async with rig({"/props": hang, "/info": INFO}) as about:
        assert await about.ask("m") == (4096, 3072, None, "/info max_total_tokens")


async def test_redirects_are_not_followed() -> None:
    """A server that points elsewhere is not followed there: its key goes nowhere else."""
    async with serving({"/v1/models": VLLM}) as other:

        async def elsewhere(request: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(f"{other.url}/v1/models")

        async with rig({"/v1/models": elsewhere}) as about:
            assert await about.ask("my-lora") is None
        assert other.asked == []


async def test_an_answer_in_an_encoding_is_refused() -> None:
    """A compressed answer that nobody asked for could unfold to any size: it is not looked at."""

    async def squeezed(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"\x1f\x8b", headers={"content-encoding": "gzip"})

    async with rig({"/v1/models": squeezed}) as about:
        assert await about.ask("m") is None
        assert "encoding" in str(about.probes.surveys()["up"]["trouble"])
