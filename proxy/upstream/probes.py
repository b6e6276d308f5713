"""Probes servers for the windows of their models, in the background: no request waits for it.

One probe queries a server for all its models. The list of models comes first, since most servers state windows there.
Native routes of other kinds of server are tried only if the list does not show which kind this is.

    after a probe                                        the next one
    every requested model's window is known              after ``FRESH_SECONDS``
    a requested model is listed but not loaded           after ``LOADING_RETRY``: it gets its window when it is loaded
    the server did not answer, or stated nothing         after ``FIRST_RETRY``, twice as long after each failure

Processes that share a store share the answers (``Shared``), so that one of them probes for all.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from proxy.core.errors import UllageError
from proxy.core.models import ServerWindow
from proxy.engine.ports import Clock, Records, Reply
from proxy.engine.replies import read_up_to
from proxy.tasks import Spawn
from proxy.upstream import probe_formats as formats

FRESH_SECONDS: Final = 600.0
"""Seconds for which an answer is valid: operators change a server's window rarely, and by a restart."""

FIRST_RETRY: Final = 60.0
"""Seconds from a failure to the next probe; twice that after the next failure, up to ``FRESH_SECONDS``."""

LOADING_RETRY: Final = 5.0
"""Seconds to the next probe if a server has not loaded a model yet: it chooses the window when it loads it."""

MOST_SHARED: Final = 2**18
"""Bytes of the largest answer that is shared. With a larger one each process probes the server itself."""

MOST_SKEW: Final = 5.0
"""Seconds by which the clock of the process that shared an answer may be ahead of ours."""

MOST_REQUESTED: Final = 100
"""Requested models that are remembered for each server: their names come from clients."""

DEADLINE: Final = 3.0
"""Seconds for all requests of one probe together."""

MOST_BYTES: Final = 2**20
"""Bytes of one answer."""

INLINE: Final = 2**15
"""Bytes of the largest answer that is decoded on the event loop; a larger one is decoded in a thread."""

WITHOUT_WINDOWS: Final = (
    "api.openai.com",
    "api.anthropic.com",
    "openai.azure.com",
    "cognitiveservices.azure.com",
    "services.ai.azure.com",
    "amazonaws.com",
    "api.aws",
    "googleapis.com",
    "api.x.ai",
    "api.cohere.com",
    "api.cohere.ai",
    "api.deepseek.com",
    "api.perplexity.ai",
)
"""Hosted APIs, by the end of their host names, without a route that states a window and needs no key.

OpenAI's entries of models, for one, have no window: https://platform.openai.com/docs/api-reference/models/list.
"""

OWNER: Final = hashlib.sha256(b"what servers say of themselves").digest()
"""The tenant that owns shared answers, which no credential can have. The text is part of keys in stores: it must not
change.
"""


class Shared(msgspec.Struct, frozen=True):
    """The windows that a server stated, as other processes read them.

    ``at`` is the Unix time of the probe, as are the windows' ``since`` here. The answer is valid for ``valid_seconds``
    and is about the models ``probed``. The names in the store stay, so that processes of two versions share it.
    """

    at: float
    valid_seconds: float = msgspec.field(name="good")
    probed: tuple[str, ...] = msgspec.field(name="asked")
    listed: frozenset[str]
    windows: dict[str, ServerWindow]


OnWindows = Callable[[str, Mapping[str, ServerWindow]], None]
"""Called with an upstream's name and its windows by model, whenever they changed."""


class _Server(msgspec.Struct):
    """The state of one upstream. ``shared_name`` is the name of its shared answer.

    ``requested`` are the models of requests, newest last. ``due`` is the monotonic second of the next probe,
    ``checked`` that of the last one, ``pause`` the seconds between two after failures. ``problem`` is the reason why
    there are no windows, for people.
    """

    name: str
    shared_name: str
    windows: dict[str, ServerWindow] = msgspec.field(default_factory=dict)
    requested: OrderedDict[str, None] = msgspec.field(default_factory=OrderedDict)
    listed: frozenset[str] = frozenset()
    due: float = 0.0
    pause: float = 0.0
    probing: bool = False
    checked: float | None = None
    problem: str = ""


class Probes:
    """Probes servers for their windows in the background, and stores their answers.

    *upstreams* are base URLs by name. *on_windows* is called after each probe that changed something. *records* share
    the answers with other processes. *wall* is Unix time. Only the event loop's thread uses it.
    """

    def __init__(
        self,
        upstreams: Mapping[str, str],
        send: SendProbe,
        spawn: Spawn,
        clock: Clock,
        agent: str,
        on_windows: OnWindows | None,
        records: Records | None,
        wall: Clock = time.time,
    ) -> None:
        self._servers = {
            name: _Server(name, f"windows {name} {url}") for name, url in upstreams.items() if may_answer(url)
        }
        self._records = records
        self._wall = wall
        self._send = send
        self._spawn = spawn
        self._clock = clock
        self._headers = (("accept", "application/json"), ("user-agent", agent))
        self._on_windows = on_windows
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def window_of(self, upstream: str, model: str, refresh: bool = True) -> ServerWindow | None:
        """Return the window that *upstream* last stated for *model*, or None. Never waits.

        If it is unknown or old the server is probed in the background, unless *refresh* is False.
        """
        server = self._servers.get(upstream)
        if server is None:
            return None
        if refresh:
            if model not in server.requested:
                self._request(server, model)
            if not server.probing and self._clock() >= server.due:
                self._start(server)
        return formats.find_window(server.windows, model)

    def adopt(self, before: Probes) -> None:
        """Take over the windows that *before* has of servers that are still configured at the same address."""
        for name, server in before._servers.items():
            if name in self._servers and self._servers[name].shared_name == server.shared_name:
                self._servers[name] = replace(server, probing=False, requested=OrderedDict(server.requested))

    async def close(self) -> None:
        """End the probes under way, and begin no others."""
        self._servers.clear()
        for task in self._tasks.values():
            task.cancel()
        # A failure was reported by whatever spawned the task.
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def stated_windows(self) -> list[dict[str, object]]:
        """Return a row for each window, as people read it: tokens, and its age in seconds."""
        now = self._clock()
        return [
            {
                "upstream": server.name,
                "model": model,
                "context_window": window.context_window,
                "max_input_tokens": window.max_input_tokens,
                "max_output_tokens": window.max_output_tokens,
                "how": window.origin,
                "age_seconds": round(now - window.since, 1),
            }
            for server in self._servers.values()
            for model, window in _shown_windows(server)
        ]

    def last_probes(self) -> dict[str, dict[str, object]]:
        """Return the result of the last probe of each upstream, for people: its age in seconds, and the problem."""
        return {
            server.name: {
                "age_seconds": self._age(server),
                "windows": len(server.windows),
                "trouble": server.problem,
            }
            for server in self._servers.values()
        }

    def _age(self, server: _Server) -> float | None:
        """Return the seconds since the last probe of *server*, or None if there was none."""
        if server.checked is None:
            return None
        return round(self._clock() - server.checked, 1)

    def windows(self, upstream: str) -> Mapping[str, ServerWindow]:
        """Return the windows of *upstream* by model; ``*`` stands for every model of a server that has one."""
        server = self._servers.get(upstream)
        if server is None:
            return {}
        return dict(server.windows)

    async def probe_now(self, upstream: str, models: Iterable[str]) -> None:
        """Probe *upstream* now, for *models* in particular, and wait for the answer. Does not raise."""
        server = self._servers.get(upstream)
        if server is None or server.probing:
            return
        for model in models:
            self._request(server, model)
        server.probing = True
        await self._probe(server, shared=False)

    def _request(self, server: _Server, model: str) -> None:
        """Add *model* to the requested ones, which the next probe is about."""
        server.requested[model] = None
        if len(server.requested) > MOST_REQUESTED:
            server.requested.popitem(last=False)
        if model in server.listed and model not in server.windows:
            # No probe was about this model yet.
            server.due = min(server.due, self._clock() + LOADING_RETRY)

    def _start(self, server: _Server) -> None:
        server.probing = True
        self._tasks[server.name] = self._spawn(self._probe(server), f"probe {server.name}")

    async def _probe(self, server: _Server, *, shared: bool = True) -> None:
        """Take over another process's answer if *shared* answers may be used, else query *server*."""
        try:
            async with asyncio.timeout(DEADLINE):
                if shared and await self._adopt(server):
                    return
                models = tuple(server.requested)
                result = await Probe(server.name, models, self._send, self._headers).run()
        except TimeoutError:
            self._failed(server, f"no answer within {DEADLINE:g} s")
        except (UllageError, formats.Unreadable) as error:
            self._failed(server, str(error))
        else:
            self._succeeded(server, result)
            self._share(server, models, result)
        finally:
            server.probing = False

    async def _adopt(self, server: _Server) -> bool:
        """Take over the answer of another process. Return False if it is too old or lacks a model requested here."""
        if self._records is None:
            return False
        shared = _decode(await self._records.read_route(OWNER, server.shared_name))
        if shared is None:
            return False
        now, wall = self._clock(), self._wall()
        age = wall - shared.at
        if not -MOST_SKEW <= age < min(shared.valid_seconds, FRESH_SECONDS):
            return False
        probed = {name for model in shared.probed for name in (model, f"{model}:latest")}
        others = [model for model in _requested_and_listed(server.requested, shared.listed) if model not in probed]
        if any(formats.find_window(shared.windows, model) is None for model in others):
            return False
        windows = {
            model: replace(window, since=min(now, window.since + now - wall))
            for model, window in shared.windows.items()
        }
        self._update(server, windows, shared.listed, now - max(0.0, age))
        server.due = now + shared.valid_seconds - max(0.0, age)
        return True

    def _share(self, server: _Server, models: tuple[str, ...], result: ProbeResult) -> None:
        """Save the answer about *models* for the other processes."""
        if self._records is None:
            return
        now, wall = self._clock(), self._wall()
        windows = {name: replace(window, since=wall - now + window.since) for name, window in server.windows.items()}
        valid_seconds = FRESH_SECONDS
        if result.loading:
            valid_seconds = LOADING_RETRY
        value = msgspec.msgpack.encode(Shared(wall, valid_seconds, models, result.listed, windows))
        if len(value) <= MOST_SHARED:
            self._records.save_route(OWNER, server.shared_name, value)

    def _failed(self, server: _Server, problem: str) -> None:
        server.problem, server.checked = problem, self._clock()
        self._retry(server, FIRST_RETRY)

    def _succeeded(self, server: _Server, result: ProbeResult) -> None:
        now = self._clock()
        windows = {model: replace(window, since=now) for model, window in result.windows.items()}
        self._update(server, windows, result.listed, now)
        if result.loading:
            self._retry(server, LOADING_RETRY)
        else:
            server.pause = 0.0
            server.due = now + FRESH_SECONDS

    def _update(
        self, server: _Server, stated: Mapping[str, ServerWindow], listed: frozenset[str], checked: float
    ) -> None:
        """Store the windows *stated*. A window that is as before keeps its age."""
        before = server.windows
        server.windows = {model: _unchanged(before.get(model), window) or window for model, window in stated.items()}
        server.listed, server.checked = listed, checked
        server.problem = ""
        if not stated:
            server.problem = "it says nothing of windows"
        if self._on_windows is not None and server.windows and server.windows != before:
            self._on_windows(server.name, server.windows)

    def _retry(self, server: _Server, first: float) -> None:
        """Set the time of the next probe: *first* seconds from now, twice as long after each failure."""
        server.pause = min(FRESH_SECONDS, max(first, server.pause * 2))
        # Random, so that many workers and replicas do not probe at the same moment.
        server.due = self._clock() + server.pause * random.uniform(0.9, 1.1)  # noqa: S311 - no secret


def _unchanged(before: ServerWindow | None, window: ServerWindow) -> ServerWindow | None:
    """Return *before* if it differs from *window* in its age only, else None."""
    if before is None or replace(before, since=window.since) != window:
        return None
    return before


def may_answer(base_url: str) -> bool:
    """True if a server at *base_url* may state windows: False for hosted APIs known to have no such route."""
    host = urlsplit(base_url).hostname or ""
    return not any(host == name or host.endswith(f".{name}") for name in WITHOUT_WINDOWS)


def _decode(value: bytes | None) -> Shared | None:
    """Return the shared answer of *value*; None if there is none or it cannot be read."""
    if value is None:
        return None
    try:
        return msgspec.msgpack.decode(value, type=Shared)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _shown_windows(server: _Server) -> list[tuple[str, ServerWindow]]:
    """Return the windows of the requested models, and of the first twenty others, sorted by name."""
    few = dict(list(server.windows.items())[:20])
    requested = {model: window for model in server.requested if (window := formats.find_window(server.windows, model))}
    return sorted({**few, **requested}.items())


SendProbe = Callable[[str, str, str, Sequence[tuple[str, str]], bytes | None], Awaitable[Reply]]
"""Sends a request: upstream, method, path, headers, body. It adds that upstream's own key and follows no redirect."""


class ProbeResult(msgspec.Struct, frozen=True):
    """The answers of one server: windows by model, and the models it lists.

    ``loading`` is true if a requested model is listed and not loaded yet.
    """

    windows: dict[str, ServerWindow]
    listed: frozenset[str]
    loading: bool = False


class Probe:
    """Queries one server once for the windows of the *requested* models."""

    def __init__(
        self, upstream: str, requested: tuple[str, ...], send: SendProbe, headers: Sequence[tuple[str, str]]
    ) -> None:
        self._upstream = upstream
        self._requested = requested
        self._send = send
        self._headers = headers

    async def run(self) -> ProbeResult:
        """Return the answers. Raises ``UllageError`` and ``Unreadable`` if the server does not answer at all."""
        rows = formats.model_entries(await self._exchange("GET", "/v1/models"))
        listed, kind = frozenset(rows), formats.server_kind(rows)
        windows = formats.listed_windows(rows)
        if windows and kind == "sglang":
            info = await self._try("/server_info") or await self._try("/get_server_info")
            windows = formats.sglang_windows(info, windows)
        if windows and kind in formats.ONE_MODEL_KINDS and len(rows) == 1:
            windows[formats.EVERY_MODEL] = next(iter(windows.values()))
        if windows or kind == "other":
            return ProbeResult(windows, listed)
        return await self._native(kind, listed)

    async def _native(self, kind: formats.Kind, listed: frozenset[str]) -> ProbeResult:
        """Return the answers of the native routes of this *kind* of server; all are tried if it is empty."""
        if kind in ("llamacpp", "") and (stated := formats.llamacpp_window(await self._try("/props"))):
            return ProbeResult(stated, listed)
        if kind in ("lmstudio", ""):
            loaded = formats.lmstudio_windows(await self._try("/api/v0/models"))
            if loaded is not None:
                requested = _requested_and_listed(self._requested, listed)
                loading = any(formats.find_window(loaded, model) is None for model in requested)
                return ProbeResult(loaded, listed, loading)
        if kind in ("ollama", ""):
            running = formats.ollama_running_windows(await self._try("/api/ps"))
            if running is not None:
                return await self._ollama(running, listed)
        if kind in ("tgi", ""):
            return ProbeResult(formats.tgi_window(await self._try("/info")), listed)
        return ProbeResult({}, listed)

    async def _ollama(self, stated: dict[str, ServerWindow], listed: frozenset[str]) -> ProbeResult:
        """Return the windows *stated* for running models, and those of requested ones that are not running."""
        loading = False
        for model in _requested_and_listed(self._requested, listed):
            if formats.find_window(stated, model) is not None:
                continue
            loading = True  # its window is certain only once it runs
            window = formats.ollama_window(await self._try("/api/show", {"model": model}))
            if window is not None:
                stated[model] = window
        return ProbeResult(stated, listed, loading)

    async def _try(self, path: str, body: Mapping[str, str] | None = None) -> object | None:
        """Return the answer of a native route, or None if the server is of another kind."""
        try:
            async with asyncio.timeout(DEADLINE / 3):
                if body is None:
                    return await self._exchange("GET", path)
                return await self._exchange("POST", path, body)
        except (UllageError, formats.Unreadable, TimeoutError):
            return None

    async def _exchange(self, method: str, path: str, body: Mapping[str, str] | None = None) -> object | None:
        """Return the JSON of the answer, or None if there is no such route. Raises ``Unreadable``."""
        headers, sent = self._headers, None
        if body is not None:
            headers, sent = (*headers, ("content-type", "application/json")), msgspec.json.encode(body)
        reply = await self._send(self._upstream, method, path, headers, sent)
        try:
            if reply.status in (404, 405, 501):
                return None
            if reply.status != 200:
                raise formats.Unreadable(f"{method} {path} answered {reply.status}")
            if reply.header("content-encoding") not in ("", "identity"):
                raise formats.Unreadable(f"{method} {path} answered in a content encoding that it may not use")
            received: list[bytes] = []
            if not await read_up_to(reply, received, MOST_BYTES):
                raise formats.Unreadable(f"an answer of more than {MOST_BYTES} bytes")
        finally:
            reply.close()
        answer = b"".join(received)
        if len(answer) <= INLINE:
            return formats.decode(answer)
        # A list of hundreds of models takes milliseconds to decode; requests must not wait for that.
        return await asyncio.to_thread(formats.decode, answer)


def _requested_and_listed(requested: Iterable[str], listed: frozenset[str]) -> list[str]:
    """Return those of *requested* that the server has *listed*: a client may have invented the others."""
    return [model for model in requested if model in listed or f"{model}:latest" in listed]
