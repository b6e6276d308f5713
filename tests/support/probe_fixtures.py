"""Servers on loopback that answer with given bytes, and probes of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from proxy.core.models import ServerWindow
from proxy.tasks import Tasks
from proxy.upstream import Probes, Target, Upstreams
from proxy.upstream.probes import OWNER
from tests.support.proxy_process import until

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEY = "the-configured-key"


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class ServedRoutes:
    """A server with a few routes: bytes, or a handler; everything else is 404. ``asked`` has every request."""

    def __init__(self, routes: Mapping[str, bytes | Handler]) -> None:
        self.routes = dict(routes)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.method, request.path, headers, body))
        route = self.routes.get(f"{request.method} {request.path}") or self.routes.get(request.path)
        if route is None:
            return web.Response(status=404, text="Not Found")
        if isinstance(route, bytes):
            return web.Response(body=route, content_type="application/json")
        return await route(request)

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.requests]


@asynccontextmanager
async def serving(routes: Mapping[str, bytes | Handler]) -> AsyncIterator[ServedRoutes]:
    site = ServedRoutes(routes)
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", site.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield site
    finally:
        await runner.cleanup()


class SharedAnswers:
    """The answers that processes share, in a dictionary: the two methods of ``ports.Records`` that probes call."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def read_route(self, tenant: bytes, name: str) -> bytes | None:
        assert tenant == OWNER
        return self.values.get(name)

    def save_route(self, tenant: bytes, name: str, value: bytes) -> None:
        assert tenant == OWNER
        self.values[name] = value


class ProbedServer:
    """Probes of one server, with everything around them real but the clock."""

    def __init__(
        self, site: ServedRoutes, suffix: str = "/v1", shelf: SharedAnswers | None = None, ahead: float = 10.0**9
    ) -> None:
        self.site = site
        self.clock = ManualClock()
        self.failures: list[BaseException] = []
        self.tasks = Tasks(lambda _, error: self.failures.append(error))
        self.heard: list[dict[str, ServerWindow]] = []
        url = f"{site.url}{suffix}"
        self.upstream = Upstreams([Target("up", url, KEY, headers={"x-team": "t"})])
        self.probes = Probes(
            {"up": url},
            self.upstream.send,
            self.tasks.spawn,
            self.clock,
            "ullage/test",
            lambda _, windows: self.heard.append(dict(windows)),
            shelf,
            lambda: self.clock() + ahead,
        )

    def stated_window(self, model: str) -> tuple[int, int | None, int | None, str] | None:
        window = self.probes.window_of("up", model)
        return window and (window.context_window, window.max_input_tokens, window.max_output_tokens, window.origin)

    async def ask(self, model: str) -> tuple[int, int | None, int | None, str] | None:
        """The window known of *model* once the probe that its first use starts has ended."""
        self.stated_window(model)
        await self.settle()
        return self.stated_window(model)

    async def settle(self) -> None:
        await until(lambda: len(self.tasks) == 0)
        assert self.failures == []


@asynccontextmanager
async def probed_server(routes: Mapping[str, bytes | Handler], suffix: str = "/v1") -> AsyncIterator[ProbedServer]:
    async with AsyncExitStack() as stack:
        yield await opened(stack, ProbedServer(await stack.enter_async_context(serving(routes)), suffix))


async def opened(stack: AsyncExitStack, server: ProbedServer) -> ProbedServer:
    """*server*, closed with *stack*."""
    stack.push_async_callback(server.upstream.close)
    stack.push_async_callback(server.tasks.finish, 0.0)
    return server


VLLM = (
    b'{"object":"list","data":[{"id":"Qwen/Qwen2.5-7B-Instruct","object":"model","created":1760000000,'
    b'"owned_by":"vllm","root":"Qwen/Qwen2.5-7B-Instruct","parent":null,"max_model_len":32768,'
    b'"permission":[{"id":"modelperm-1","object":"model_permission"}]},{"id":"my-lora","object":"model",'
    b'"created":1760000000,"owned_by":"vllm","root":"/loras/my","parent":"Qwen/Qwen2.5-7B-Instruct",'
    b'"max_model_len":null,"permission":[]}]}'
)
SGLANG = (
    b'{"object":"list","data":[{"id":"qwen3.6","object":"model","created":1760000000,"owned_by":"sglang",'
    b'"root":"qwen3.6","parent":null,"max_model_len":262144}]}'
)
SGLANG_INFO = (
    b'{"model_path":"/models/qwen3.6","context_length":null,"mem_fraction_static":0.718,"max_total_tokens":null,'
    b'"max_total_num_tokens":37081,"max_req_input_len":37075,"version":"0.5.19","internal_states":[{}]}'
)
LLAMACPP = (
    b'{"models":[{"name":"/m/L.gguf"}],"object":"list","data":[{"id":"/m/L.gguf","object":"model",'
    b'"created":1735142223,"owned_by":"llamacpp","meta":{"vocab_type":2,"n_vocab":128256,"n_ctx_train":131072,'
    b'"n_embd":4096,"n_params":8030261312,"size":4912898304}}]}'
)
LLAMACPP_NEW = LLAMACPP.replace(b'"n_ctx_train"', b'"n_ctx":8192,"n_ctx_train"')
PROPS = (
    b'{"default_generation_settings":{"id":0,"id_task":-1,"n_ctx":16384,"speculative":false,"is_processing":false,'
    b'"params":{"n_predict":-1}},"total_slots":4,"model_path":"/m/L.gguf","chat_template":"...","build_info":"b8681"}'
)
OLLAMA = (
    b'{"object":"list","data":[{"id":"llama3.2:latest","object":"model","created":1721000000,"owned_by":"library"},'
    b'{"id":"qwen:7b","object":"model","created":1721000000,"owned_by":"library"}]}\n'
)
PS = (
    b'{"models":[{"name":"qwen:7b","model":"qwen:7b","size":492523008,"digest":"a8b0","details":{"format":"gguf"},'
    b'"expires_at":"2026-11-02T08:15:34.383753787Z","size_vram":0,"context_length":8192}]}'
)
SHOW = (
    b'{"modelfile":"FROM x","parameters":"num_keep                       24\\nnum_ctx                        16384\\n'
    b'stop                           \\"<|eot_id|>\\"","details":{"family":"llama"},"model_info":{'
    b'"general.architecture":"llama","llama.context_length":131072,"llama.embedding_length":4096,'
    b'"tokenizer.ggml.merges":null}}'
)
LMSTUDIO = (
    b'{"data":[{"id":"qwen2-vl-7b","object":"model","owned_by":"organization_owner"},'
    b'{"id":"llama-3.1-8b","object":"model","owned_by":"organization_owner"}],"object":"list"}'
)
LMSTUDIO_V0 = (
    b'{"object":"list","data":[{"id":"qwen2-vl-7b","object":"model","type":"vlm","state":"not-loaded",'
    b'"max_context_length":32768},{"id":"llama-3.1-8b","object":"model","type":"llm","state":"loaded",'
    b'"max_context_length":131072,"loaded_context_length":4096}]}'
)
TGI = (
    b'{"object":"list","data":[{"id":"HuggingFaceH4/zephyr","object":"model","created":0,'
    b'"owned_by":"HuggingFaceH4/zephyr"}]}'
)
INFO = (
    b'{"model_id":"HuggingFaceH4/zephyr","model_sha":"b70e","model_dtype":"torch.float16","max_concurrent_requests":128,'
    b'"max_best_of":2,"max_stop_sequences":4,"max_input_tokens":3072,"max_total_tokens":4096,"version":"3.3.6"}'
)
OPENROUTER = (
    b'{"data":[{"id":"openai/gpt-5","context_length":400000,"pricing":{"prompt":"0.00000125"},'
    b'"top_provider":{"context_length":400000,"max_completion_tokens":128000,"is_moderated":true},'
    b'"per_request_limits":null},{"id":"x/y","context_length":131072,"top_provider":{"context_length":32768,'
    b'"max_completion_tokens":null}}]}'
)
GROQ = (
    b'{"object":"list","data":[{"id":"llama-3.3-70b","object":"model","created":1,"owned_by":"Meta","active":true,'
    b'"context_window":131072,"max_completion_tokens":32768}]}'
)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("no test waits that long")


@asynccontextmanager
async def two_processes(
    routes: Mapping[str, bytes | Handler], behind: float = 0.0
) -> AsyncIterator[tuple[ProbedServer, ProbedServer]]:
    """Two processes with one shelf, in front of one server; their monotonic clocks have nothing in common."""
    async with AsyncExitStack() as stack:
        site, shelf = await stack.enter_async_context(serving(routes)), SharedAnswers()
        first = await opened(stack, ProbedServer(site, shelf=shelf))
        second = await opened(stack, ProbedServer(site, shelf=shelf, ahead=10.0**9 + 1000.0 - 77.0 - behind))
        second.clock.time = 77.0
        yield first, second
