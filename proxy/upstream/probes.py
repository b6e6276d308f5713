"""The windows that servers state: asked for in the background, never while a request waits.

A server is asked as a whole, one survey at a time. The list of models comes first, since most servers state it there;
the native routes of those that do not are tried only where the list does not name another kind of server.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

import msgspec

from proxy.core.errors import UllageError
from proxy.core.models import ServerWindow
from proxy.engine.ports import Clock, Records, Reply
from proxy.tasks import Spawn
from proxy.upstream import probe_formats as formats

FRESH_SECONDS: Final = 600.0
"""Seconds for which an answer is valid."""

FIRST_RETRY: Final = 60.0
"""Seconds from a failure to the next try; twice that after the next failure, up to ``FRESH_SECONDS``."""

LOADING_RETRY: Final = 5.0
"""The same for a server that has not loaded the model yet: it chooses the window when it loads it."""

MOST_SHARED: Final = 2**18
"""Bytes of an answer that are shared. Larger ones are asked for by each process."""

MOST_SKEW: Final = 5.0
"""Seconds by which another machine's clock may be ahead."""

MOST_WANTED: Final = 100
"""Models remembered as wanted, of each server: their names come from clients."""

SILENT: Final = (
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
"""Hosted APIs, by the end of their host names, without a route that states a window and needs no key."""


class SharedProbeCache:
    """Windows that servers stated, shared by the processes of one store. It holds no tenant's data."""

    def __init__(self, records: Records) -> None:
        self._records = records
        # A tenant that no credential can have. The text is part of keys in stores: it must not change.
        self._owner = hashlib.sha256(b"what servers say of themselves").digest()

    async def read(self, name: str) -> bytes | None:
        """Return the value last saved under *name*, or None."""
        return await self._records.read_route(self._owner, name)

    def save(self, name: str, value: bytes) -> None:
        """Save *value* under *name* in the background."""
        self._records.save_route(self._owner, name, value)


class Shared(msgspec.Struct, frozen=True):
    """The windows that a server stated, as other processes read them.

    ``at`` is when (Unix time, as are the windows' ``at`` here), ``good`` for how many seconds they are valid, ``asked``
    the models that the server was asked about.
    """

    at: float
    good: float
    asked: tuple[str, ...]
    listed: frozenset[str]
    windows: dict[str, ServerWindow]


OnWindows = Callable[[str, Mapping[str, ServerWindow]], None]
"""Called with an upstream's name and its windows by model, whenever they changed."""


@dataclass
class _Server:
    """The state of one upstream. ``cache_name`` is its name in the shared cache.

    ``due`` is the monotonic second from which on it may be asked again.
    """

    name: str
    cache_name: str
    windows: dict[str, ServerWindow] = field(default_factory=dict)
    wanted: OrderedDict[str, None] = field(default_factory=OrderedDict)
    listed: frozenset[str] = frozenset()
    due: float = 0.0
    pause: float = 0.0
    asking: bool = False
    checked: float | None = None
    trouble: str = ""


class Probes:
    """Asks servers for their windows in the background, and holds their answers.

    *upstreams* are base URLs by name, of those that may be asked. *on_windows* is called after each survey that changed
    something. The answers of one process are in the *cache* for the others. *wall* is Unix time.
    """

    def __init__(
        self,
        upstreams: Mapping[str, str],
        ask: Ask,
        spawn: Spawn,
        clock: Clock,
        agent: str,
        on_windows: OnWindows | None = None,
        cache: SharedProbeCache | None = None,
        wall: Clock = time.time,
    ) -> None:
        self._servers = {
            name: _Server(name, f"windows {name} {url}") for name, url in upstreams.items() if may_answer(url)
        }
        self._cache = cache
        self._wall = wall
        self._ask = ask
        self._spawn = spawn
        self._clock = clock
        self._headers = (("accept", "application/json"), ("user-agent", agent))
        self._on_windows = on_windows
        self._surveys: dict[str, asyncio.Task[None]] = {}

    def window_of(self, upstream: str, model: str, ask: bool = True) -> ServerWindow | None:
        """Return the window that *upstream* last stated for *model*. Never waits.

        If it is unknown or old the server is asked in the background, unless *ask* is False.
        """
        server = self._servers.get(upstream)
        if server is None:
            return None
        if not ask:
            return _find(server.windows, model)
        if model not in server.wanted:
            self._want(server, model)
        if not server.asking and self._clock() >= server.due:
            self._start(server)
        return _find(server.windows, model)

    async def close(self) -> None:
        """End what is under way, and ask nothing more."""
        self._servers.clear()
        for task in self._surveys.values():
            task.cancel()
        await asyncio.gather(*self._surveys.values(), return_exceptions=True)  # a failure was reported by its keeper

    def known(self) -> list[dict[str, object]]:
        """Return the windows of models that were asked for, as people read them: tokens, and ages in seconds."""
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
            for model, window in _shown(server)
        ]

    def surveys(self) -> dict[str, dict[str, object]]:
        """Return how the last survey of each upstream went, as people read it: its age in seconds and what failed."""
        now = self._clock()
        return {
            server.name: {
                "age_seconds": None if server.checked is None else round(now - server.checked, 1),
                "windows": len(server.windows),
                "trouble": server.trouble,
            }
            for server in self._servers.values()
        }

    def windows(self, upstream: str) -> Mapping[str, ServerWindow]:
        """Return the windows of *upstream* by model; ``*`` stands for every model of a server that has one."""
        server = self._servers.get(upstream)
        return dict(server.windows) if server else {}

    async def survey(self, upstream: str, models: Iterable[str] = ()) -> None:
        """Ask *upstream* now, about *models* in particular, and wait for the answer. Does not raise."""
        server = self._servers.get(upstream)
        if server is not None and not server.asking:
            for model in models:
                self._want(server, model)
            server.asking = True
            await self._survey(server, shared=False)

    def _want(self, server: _Server, model: str) -> None:
        server.wanted[model] = None
        if len(server.wanted) > MOST_WANTED:
            server.wanted.popitem(last=False)
        if model in server.listed and model not in server.windows:
            server.due = min(server.due, self._clock() + LOADING_RETRY)  # a model that was never asked about by name

    def _start(self, server: _Server) -> None:
        server.asking = True
        self._surveys[server.name] = self._spawn(self._survey(server), f"probe {server.name}")

    async def _survey(self, server: _Server, *, shared: bool = True) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                if shared and await self._adopt(server):
                    return
                asked = tuple(server.wanted)
                found = await Survey(server.name, asked, self._ask, self._headers).run()
        except TimeoutError:
            self._failed(server, f"no answer within {DEADLINE:g} s")
        except (UllageError, formats.Unreadable) as error:
            self._failed(server, str(error))
        else:
            self._succeeded(server, found)
            self._share(server, asked, found)
        finally:
            server.asking = False

    async def _adopt(self, server: _Server) -> bool:
        """Take over the answer of another process, if it is recent and about all models wanted here. True if it was."""
        value = await self._cache.read(server.cache_name) if self._cache is not None else None
        shared = _load(value)
        if shared is None:
            return False
        now, age = self._clock(), self._wall() - shared.at
        if not -MOST_SKEW <= age < min(shared.good, FRESH_SECONDS):
            return False
        asked = {name for model in shared.asked for name in (model, f"{model}:latest")}
        unasked = [model for model in among(server.wanted, shared.listed) if model not in asked]
        if any(_find(shared.windows, model) is None for model in unasked):
            return False
        since = now - self._wall()
        stated = {
            model: replace(window, since=min(now, window.since + since)) for model, window in shared.windows.items()
        }
        self._hold(server, stated, shared.listed, now - max(0.0, age))
        server.due = now + shared.good - max(0.0, age)
        return True

    def _share(self, server: _Server, asked: tuple[str, ...], found: Found) -> None:
        if self._cache is None:
            return
        now, wall = self._clock(), self._wall()
        windows = {name: replace(window, since=wall - now + window.since) for name, window in server.windows.items()}
        good = LOADING_RETRY if found.loading else FRESH_SECONDS
        value = msgspec.msgpack.encode(Shared(wall, good, asked, found.listed, windows))
        if len(value) <= MOST_SHARED:
            self._cache.save(server.cache_name, value)

    def _failed(self, server: _Server, trouble: str) -> None:
        server.trouble, server.checked = trouble, self._clock()
        self._again(server, FIRST_RETRY)

    def _succeeded(self, server: _Server, found: Found) -> None:
        now = self._clock()
        self._hold(
            server, {model: replace(window, since=now) for model, window in found.windows.items()}, found.listed, now
        )
        if found.loading:
            self._again(server, LOADING_RETRY)
        else:
            server.pause = 0.0
            server.due = now + FRESH_SECONDS

    def _hold(
        self, server: _Server, stated: Mapping[str, ServerWindow], listed: frozenset[str], checked: float
    ) -> None:
        """Take over the windows *stated*. A window that is as before keeps its age."""
        before = server.windows
        server.windows = {
            model: known if (known := before.get(model)) and replace(known, since=window.since) == window else window
            for model, window in stated.items()
        }
        server.listed, server.checked = listed, checked
        server.trouble = "" if stated else "it says nothing of windows"
        if self._on_windows is not None and server.windows and server.windows != before:
            self._on_windows(server.name, server.windows)

    def _again(self, server: _Server, first: float) -> None:
        server.pause = min(FRESH_SECONDS, max(first, server.pause * 2))
        # Many workers and replicas should not ask at the same moment.
        server.due = self._clock() + server.pause * random.uniform(0.9, 1.1)  # noqa: S311 - no secret


def may_answer(base_url: str) -> bool:
    """True if a server at *base_url* may state windows: False for hosted APIs known to have no such route."""
    host = urlsplit(base_url).hostname or ""
    return not any(host == name or host.endswith(f".{name}") for name in SILENT)


def _load(value: bytes | None) -> Shared | None:
    if value is None:
        return None
    try:
        return msgspec.msgpack.decode(value, type=Shared)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _find(windows: Mapping[str, ServerWindow], model: str) -> ServerWindow | None:
    return formats.find(windows, model) if windows else None


def _shown(server: _Server) -> list[tuple[str, ServerWindow]]:
    few = dict(list(server.windows.items())[:20])
    asked = {model: found for model in server.wanted if (found := _find(server.windows, model))}
    return sorted({**few, **asked}.items())


DEADLINE: Final = 3.0
"""Seconds for all questions of one survey together."""

MOST_BYTES: Final = 2**20
"""Bytes of one answer."""

INLINE: Final = 2**15
"""Bytes of an answer that are decoded on the event loop; more in a thread."""

Ask = Callable[[str, str, str, Sequence[tuple[str, str]], bytes | None], Awaitable[Reply]]
"""Sends a request: upstream, method, path, headers, body. It adds that upstream's own key and follows no redirect."""


@dataclass(frozen=True)
class Found:
    """The answers of one server: windows by model, the models it lists, and whether a wanted one is not loaded yet."""

    windows: dict[str, ServerWindow]
    listed: frozenset[str]
    loading: bool = False


class Survey:
    """One round of questions to one server."""

    def __init__(self, upstream: str, wanted: tuple[str, ...], ask: Ask, headers: Sequence[tuple[str, str]]) -> None:
        self._upstream = upstream
        self._wanted = wanted
        self._ask = ask
        self._headers = headers

    async def run(self) -> Found:
        """Return the answers. Raises ``UllageError`` and ``Unreadable`` if the server does not answer at all."""
        rows = formats.rows(await self._exchange("GET", "/v1/models"))
        listed, kind = frozenset(rows), formats.kind(rows)
        windows = formats.listed(rows)
        if windows and kind == "sglang":
            windows = formats.sglang(await self._try("/server_info") or await self._try("/get_server_info"), windows)
        if windows and kind in formats.NAMELESS and len(rows) == 1:
            windows[formats.EVERY] = next(iter(windows.values()))
        if windows or kind == "other":
            return Found(windows, listed)
        return await self._native(kind, listed)

    async def _native(self, kind: formats.Kind, listed: frozenset[str]) -> Found:
        if kind in ("llamacpp", "") and (stated := formats.llamacpp(await self._try("/props"))):
            return Found(stated, listed)
        if kind in ("lmstudio", "") and (loaded := formats.lmstudio(await self._try("/api/v0/models"))) is not None:
            return Found(loaded, listed, any(formats.find(loaded, model) is None for model in self._asked(listed)))
        if kind in ("ollama", "") and (running := formats.ollama_running(await self._try("/api/ps"))) is not None:
            return await self._ollama(running, listed)
        if kind in ("tgi", ""):
            return Found(formats.tgi(await self._try("/info")), listed)
        return Found({}, listed)

    async def _ollama(self, stated: dict[str, ServerWindow], listed: frozenset[str]) -> Found:
        loading = False
        for model in self._asked(listed):
            if formats.find(stated, model) is None:
                window = formats.ollama_model(await self._try("/api/show", {"model": model}))
                loading = True  # what it is running with will be known once it is running
                stated |= {model: window} if window else {}
        return Found(stated, listed, loading)

    def _asked(self, listed: frozenset[str]) -> list[str]:
        # Only names the server knows: those a client made up are no reason to ask.
        return among(self._wanted, listed)

    async def _try(self, path: str, body: Mapping[str, str] | None = None) -> object | None:
        """Return the answer of a native route, or None if the server is of another kind."""
        try:
            async with asyncio.timeout(DEADLINE / 3):
                return await self._exchange("GET" if body is None else "POST", path, body)
        except (UllageError, formats.Unreadable, TimeoutError):
            return None

    async def _exchange(self, method: str, path: str, body: Mapping[str, str] | None = None) -> object | None:
        """Return the JSON of the answer, or None if there is no such route. Raises ``Unreadable``."""
        headers, sent = self._headers, None
        if body is not None:
            headers, sent = (*headers, ("content-type", "application/json")), formats.encode(body)
        reply = await self._ask(self._upstream, method, path, headers, sent)
        try:
            if reply.status in (404, 405, 501):
                return None
            if reply.status != 200:
                raise formats.Unreadable(f"{method} {path} answered {reply.status}")
            if reply.header("content-encoding") not in ("", "identity"):
                raise formats.Unreadable(f"{method} {path} answered in an encoding that was not asked for")
            answer = await _body(reply)
        finally:
            reply.close()
        # A list of hundreds of models takes milliseconds to decode; requests must not wait for that.
        return await asyncio.to_thread(formats.decode, answer) if len(answer) > INLINE else formats.decode(answer)


async def _body(reply: Reply) -> bytes:
    body = bytearray()
    while chunk := await reply.next_chunk():
        body += chunk
        if len(body) > MOST_BYTES:
            raise formats.Unreadable(f"an answer of more than {MOST_BYTES} bytes")
    return bytes(body)


def among(wanted: Iterable[str], listed: frozenset[str]) -> list[str]:
    """Those of *wanted* that a server has, by the models it *listed*."""
    return [model for model in wanted if model in listed or f"{model}:latest" in listed]
