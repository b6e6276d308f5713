"""What servers say of their own windows: asked in the background, never on a request's way.

A server is asked as a whole, one survey at a time. The list of models comes first, since most servers say it there;
the native routes of those that do not are tried only where the list does not name another kind of server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from proxy.core.errors import UllageError
from proxy.core.models import ServerWindow
from proxy.engine.ports import Clock, Reply
from proxy.upstream import probe_formats as wording

FRESH_SECONDS: Final = 600.0
"""How long an answer is good."""

FIRST_RETRY: Final = 60.0
"""How long after a failure the next try is; twice that after the next one, up to ``FRESH_SECONDS``."""

LOADING_RETRY: Final = 5.0
"""The same for a server that answers but has not loaded the model yet, so cannot say with what window it will."""

MOST_SHARED: Final = 2**18
"""Bytes of what is told that are shared; more is asked by each process."""

MOST_SKEW: Final = 5.0
"""Seconds by which another machine's clock may be ahead."""

MOST_WANTED: Final = 100
"""Models remembered as asked for, of each server: their names come from clients."""

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
"""Hosted APIs, by the end of their host names, that have no route without a key that tells a window."""


class Spawn(Protocol):
    """Starts a background task under a name and keeps it."""

    def __call__(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """The running task."""


class Shelf(Protocol):
    """Where processes leave for each other what a server said. Neither method raises or waits long."""

    async def recall(self, name: str) -> bytes | None:
        """What was last left under *name*, if anything."""

    def remember(self, name: str, value: bytes) -> None:
        """Leave *value* under *name*, in the background."""


class Shared(msgspec.Struct, frozen=True):
    """What a server said, for other processes: when (Unix time), for how many seconds it is good, asked about what.

    The windows' ``at`` are Unix times here.
    """

    at: float
    good: float
    asked: tuple[str, ...]
    listed: frozenset[str]
    windows: dict[str, ServerWindow]


OnTold = Callable[[str, Mapping[str, ServerWindow]], None]
"""Is given an upstream's name and its windows by model, whenever they changed."""


@dataclass
class _Server:
    """What is known of one upstream. ``shelf`` is its name on the shelf.

    ``due`` is the monotonic second from which on it may be asked again.
    """

    name: str
    shelf: str
    windows: dict[str, ServerWindow] = field(default_factory=dict)
    wanted: OrderedDict[str, None] = field(default_factory=OrderedDict)
    listed: frozenset[str] = frozenset()
    due: float = 0.0
    pause: float = 0.0
    asking: bool = False
    checked: float | None = None
    trouble: str = ""


class Probes:
    """Knows what servers say of their windows, as soon as they said it.

    *upstreams* are base URLs by name, of those that may be asked. *told* is called after each survey that changed
    something. What one process was told is on the *shelf* for the others; *wall* is Unix time.
    """

    def __init__(
        self,
        upstreams: Mapping[str, str],
        ask: Ask,
        spawn: Spawn,
        clock: Clock,
        agent: str,
        told: OnTold | None = None,
        shelf: Shelf | None = None,
        wall: Clock = time.time,
    ) -> None:
        self._servers = {
            name: _Server(name, f"windows {name} {url}") for name, url in upstreams.items() if may_answer(url)
        }
        self._shelf = shelf
        self._wall = wall
        self._ask = ask
        self._spawn = spawn
        self._clock = clock
        self._headers = (("accept", "application/json"), ("user-agent", agent))
        self._on_told = told
        self._surveys: dict[str, asyncio.Task[None]] = {}

    def told(self, upstream: str, model: str, ask: bool = True) -> ServerWindow | None:
        """What *upstream* last said of *model*; never waits.

        Unknown or old, it is asked for in the background, unless *ask* says that it is not worth it.
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
        """What servers said of models that were asked for, for people: figures in tokens, ages in seconds."""
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
        """How the last survey of each upstream went, for people: its age in seconds, and what stood in the way."""
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
        """The windows *upstream* told of, by model; ``*`` stands for every model of a server that has one."""
        server = self._servers.get(upstream)
        return dict(server.windows) if server else {}

    async def survey(self, upstream: str, models: Iterable[str] = ()) -> None:
        """Ask *upstream* now, about *models* in particular, and wait for the answer. Raises nothing on failure."""
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
        except (UllageError, wording.Unreadable) as error:
            self._failed(server, str(error))
        else:
            self._succeeded(server, found)
            self._share(server, asked, found)
        finally:
            server.asking = False

    async def _adopt(self, server: _Server) -> bool:
        """Whether another process has asked the server lately, about all that this one would ask; then that holds."""
        value = await self._shelf.recall(server.shelf) if self._shelf is not None else None
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
        told = {
            model: replace(window, since=min(now, window.since + since)) for model, window in shared.windows.items()
        }
        self._hold(server, told, shared.listed, now - max(0.0, age))
        server.due = now + shared.good - max(0.0, age)
        return True

    def _share(self, server: _Server, asked: tuple[str, ...], found: Found) -> None:
        if self._shelf is None:
            return
        now, wall = self._clock(), self._wall()
        windows = {name: replace(window, since=wall - now + window.since) for name, window in server.windows.items()}
        good = LOADING_RETRY if found.loading else FRESH_SECONDS
        value = msgspec.msgpack.encode(Shared(wall, good, asked, found.listed, windows))
        if len(value) <= MOST_SHARED:
            self._shelf.remember(server.shelf, value)

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

    def _hold(self, server: _Server, told: Mapping[str, ServerWindow], listed: frozenset[str], checked: float) -> None:
        """Believe what was *told*; what is as before keeps its age."""
        before = server.windows
        server.windows = {
            model: known if (known := before.get(model)) and replace(known, since=window.since) == window else window
            for model, window in told.items()
        }
        server.listed, server.checked = listed, checked
        server.trouble = "" if told else "it says nothing of windows"
        if self._on_told is not None and server.windows and server.windows != before:
            self._on_told(server.name, server.windows)

    def _again(self, server: _Server, first: float) -> None:
        server.pause = min(FRESH_SECONDS, max(first, server.pause * 2))
        # Many workers and replicas should not ask at the same moment.
        server.due = self._clock() + server.pause * random.uniform(0.9, 1.1)  # noqa: S311 - no secret


def may_answer(base_url: str) -> bool:
    """Whether a server at *base_url* could say anything: not the hosted APIs known to have no such route."""
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
    return wording.find(windows, model) if windows else None


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
    """What a server said: windows by model, the models it has, whether one of those asked about is not loaded yet."""

    windows: dict[str, ServerWindow]
    listed: frozenset[str]
    loading: bool = False


class Survey:
    """The questions put to one server, at one time."""

    def __init__(self, upstream: str, wanted: tuple[str, ...], ask: Ask, headers: Sequence[tuple[str, str]]) -> None:
        self._upstream = upstream
        self._wanted = wanted
        self._ask = ask
        self._headers = headers

    async def run(self) -> Found:
        """What the server said. Raises ``UllageError`` and ``wording.Unreadable`` where it does not answer at all."""
        rows = wording.rows(await self._exchange("GET", "/v1/models"))
        listed, kind = frozenset(rows), wording.kind(rows)
        windows = wording.listed(rows)
        if windows and kind == "sglang":
            windows = wording.sglang(await self._try("/server_info") or await self._try("/get_server_info"), windows)
        if windows and kind in wording.NAMELESS and len(rows) == 1:
            windows[wording.EVERY] = next(iter(windows.values()))
        if windows or kind == "other":
            return Found(windows, listed)
        return await self._native(kind, listed)

    async def _native(self, kind: wording.Kind, listed: frozenset[str]) -> Found:
        if kind in ("llamacpp", "") and (told := wording.llamacpp(await self._try("/props"))):
            return Found(told, listed)
        if kind in ("lmstudio", "") and (loaded := wording.lmstudio(await self._try("/api/v0/models"))) is not None:
            return Found(loaded, listed, any(wording.find(loaded, model) is None for model in self._asked(listed)))
        if kind in ("ollama", "") and (running := wording.ollama_running(await self._try("/api/ps"))) is not None:
            return await self._ollama(running, listed)
        if kind in ("tgi", ""):
            return Found(wording.tgi(await self._try("/info")), listed)
        return Found({}, listed)

    async def _ollama(self, told: dict[str, ServerWindow], listed: frozenset[str]) -> Found:
        loading = False
        for model in self._asked(listed):
            if wording.find(told, model) is None:
                window = wording.ollama_model(await self._try("/api/show", {"model": model}))
                loading = True  # what it is running with will be known once it is running
                told |= {model: window} if window else {}
        return Found(told, listed, loading)

    def _asked(self, listed: frozenset[str]) -> list[str]:
        # Only names the server knows: those a client made up are no reason to ask.
        return among(self._wanted, listed)

    async def _try(self, path: str, body: Mapping[str, str] | None = None) -> object | None:
        """What one of the native routes answers; ``None`` where the server is of another kind."""
        try:
            async with asyncio.timeout(DEADLINE / 3):
                return await self._exchange("GET" if body is None else "POST", path, body)
        except (UllageError, wording.Unreadable, TimeoutError):
            return None

    async def _exchange(self, method: str, path: str, body: Mapping[str, str] | None = None) -> object | None:
        """The JSON of the answer; ``None`` where there is no such route. Raises ``wording.Unreadable``."""
        headers, sent = self._headers, None
        if body is not None:
            headers, sent = (*headers, ("content-type", "application/json")), wording.encode(body)
        reply = await self._ask(self._upstream, method, path, headers, sent)
        try:
            if reply.status in (404, 405, 501):
                return None
            if reply.status != 200:
                raise wording.Unreadable(f"{method} {path} answered {reply.status}")
            if reply.header("content-encoding") not in ("", "identity"):
                raise wording.Unreadable(f"{method} {path} answered in an encoding that was not asked for")
            answer = await _body(reply)
        finally:
            reply.close()
        # A list of hundreds of models takes milliseconds to decode; requests must not wait for that.
        return await asyncio.to_thread(wording.decode, answer) if len(answer) > INLINE else wording.decode(answer)


async def _body(reply: Reply) -> bytes:
    taken = bytearray()
    while chunk := await reply.next_chunk():
        taken += chunk
        if len(taken) > MOST_BYTES:
            raise wording.Unreadable(f"an answer of more than {MOST_BYTES} bytes")
    return bytes(taken)


def among(wanted: Iterable[str], listed: frozenset[str]) -> list[str]:
    """Those of *wanted* that a server has, by the models it *listed*."""
    return [model for model in wanted if model in listed or f"{model}:latest" in listed]
