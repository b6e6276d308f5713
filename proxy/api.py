"""Fits requests into their model's window from Python, without a server and without a network.

``fit`` plans one request. ``Fitter`` stays open for a conversation: a compacted part has the same words when more items
follow, so that a provider's prompt cache stays useful. Both plan with the proxy's own engine, as ``POST /v1/compress``
does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypedDict, Unpack

import msgspec
from pydantic import BaseModel

from proxy.core.apis.json_edit import json_bytes
from proxy.core.apis.json_steps import decode
from proxy.core.errors import ContextTooLong, InvalidRequest, UllageError
from proxy.core.request import Options, Request
from proxy.engine.engine import Engine
from proxy.engine.ports import Refusal
from proxy.features.settings import AllSettings
from proxy.offline import offline_engine
from proxy.settings import SettingsError, load
from proxy.upstream_wiring import open_catalogue

__all__ = [
    "ContextTooLong",
    "FitOptions",
    "Fitted",
    "Fitter",
    "InvalidRequest",
    "SettingsError",
    "UllageError",
    "fit",
    "fit_async",
]

CALLER: Final = bytes(32)
"""The only caller: the program itself."""

FIGURES: Final = ("tokens_saved", "compression_ratio", "transforms_applied")
"""Members of the answer of ``/v1/compress`` that can be computed from its others: they are left out."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A request that fits, and the report of how.

    ``body`` has the members of the request as they are to be sent. ``outcome`` is ``verbatim`` or ``compacted``;
    ``reason`` says more about it, such as ``unknown-window``. All figures are in the provider's tokens; ``window`` is
    None if it is unknown.
    """

    body: dict[str, Any]
    outcome: str
    reason: str
    stages: tuple[str, ...]
    window: int | None
    tokens_before: int
    tokens_after: int
    conversation: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The items to send: the body's ``messages``, or its ``input``."""
        items: list[dict[str, Any]] = self.body.get("messages") or self.body["input"]
        return items


class FitOptions(TypedDict, total=False):
    """Options of one request.

    ``window`` is the model's window in tokens; a known one is only lowered by it. ``target`` is the most tokens that
    the result may take, or a share of the room (between 0 and 1) to compact to now. With ``keep_items`` the result has
    as many items as the request.
    """

    window: int | None
    target: float | None
    keep_items: bool


class Fitter:
    """Fits requests one after the other; an asynchronous context manager.

    *config* is a YAML file as for ``ullage serve``; without one the defaults hold, and nothing is read from the
    environment. Records are stored in memory until the context ends. Not thread-safe.

    Raises ``SettingsError`` if the file is invalid.
    """

    def __init__(self, config: str | Path | None = None) -> None:
        environ: Mapping[str, str] = {}
        if config:
            environ = os.environ
        self._settings = load(config, {}, environ, AllSettings)
        self._opened = AsyncExitStack()
        self._engine: Engine | None = None

    async def __aenter__(self) -> Self:
        catalogue = open_catalogue(self._settings)
        engine = offline_engine(self._settings, catalogue)
        self._engine = await self._opened.enter_async_context(engine)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._engine = None
        await self._opened.aclose()

    async def fit(self, request: Mapping[str, Any], *, conversation: str = "", **options: Unpack[FitOptions]) -> Fitted:
        """Return *request* as it fits; *options* are those of ``FitOptions``.

        *request* is the body of a request to Chat Completions, Messages or the Responses API, as Python objects; the
        objects in which the SDKs of OpenAI and Anthropic return messages may be in it. *conversation* separates
        conversations that begin alike.

        Raises ``InvalidRequest`` if it is no request, and ``ContextTooLong`` if it cannot be made small enough.
        """
        if self._engine is None:
            raise RuntimeError("Open it first: `async with Fitter() as fitter`.")
        if unknown := sorted(options.keys() - FitOptions.__annotations__.keys()):
            raise TypeError(f"There is no option {unknown[0]}.")  # else it would be a member of the request
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        compress = Request(
            api="chat",  # the body's shape decides
            body=_encoded({**request, **given}),
            tenant=CALLER,
            request_id="fit",
            options=Options(conversation=conversation),
            purpose="compress",
        )
        outcome = await self._engine.exchange(compress)
        if isinstance(outcome, Refusal):
            raise outcome.error
        return _fitted(decode(await outcome.reply.next_chunk()))


def _encoded(members: dict[str, Any]) -> bytes:
    """Return *members* as JSON; texts that were cut inside a character keep its half, as an escape.

    Raises ``InvalidRequest`` if something in them cannot be written as JSON.
    """
    try:
        return msgspec.json.encode(members, enc_hook=_sent_members)
    except UnicodeEncodeError:
        return json_bytes(msgspec.to_builtins(members, enc_hook=_sent_members))


def _sent_members(value: object) -> object:
    """Return the members of a message in the type of an SDK, as that SDK would send them.

    https://github.com/openai/openai-python#using-types
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    raise InvalidRequest(f"{type(value).__name__} is no type that can be sent as JSON.")


def _fitted(answer: dict[str, Any]) -> Fitted:
    """Return the *answer* of ``/v1/compress`` with our own members apart from the request's."""
    for name in FIGURES:
        answer.pop(name)
    figures = {name: answer.pop(name) for name in Fitted.__dataclass_fields__ if name != "body"}
    return Fitted(answer, **figures | {"stages": tuple(figures["stages"])})


async def fit_async(
    request: Mapping[str, Any], *, config: str | Path | None = None, **options: Unpack[FitOptions]
) -> Fitted:
    """Return *request* as it fits; arguments and errors are those of ``Fitter`` and its ``fit``."""
    async with Fitter(config) as fitter:
        return await fitter.fit(request, **options)


def fit(request: Mapping[str, Any], *, config: str | Path | None = None, **options: Unpack[FitOptions]) -> Fitted:
    """Return *request* as it fits, as ``fit_async`` does. Raises ``RuntimeError`` if an event loop runs here."""
    return asyncio.run(fit_async(request, config=config, **options))
