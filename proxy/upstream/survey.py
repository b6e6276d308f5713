"""The questions put to one server, at one time, about its windows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.core.errors import UllageError
from proxy.core.models import Window
from proxy.engine.ports import Reply
from proxy.upstream import windows as wording

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

    windows: dict[str, Window]
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

    async def _ollama(self, told: dict[str, Window], listed: frozenset[str]) -> Found:
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
