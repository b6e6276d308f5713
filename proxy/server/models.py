"""``GET /v1/models``: what can be called here, over all upstreams, with the windows that clients look for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from proxy.core.errors import NotFound, UllageError, UpstreamTimeout
from proxy.engine import ports
from proxy.server.contracts import Route, Upstream
from proxy.server.intake import CREDENTIALS

PATIENCE: Final = 5.0
"""Seconds an upstream has to list its models; one that takes longer is left out of this answer."""

LARGEST: Final = 8 * 2**20
"""Bytes of a list that are read."""

Figures = Callable[[str], Mapping[str, int]]
"""A model's limits in tokens, by the names clients read them under."""


@dataclass(frozen=True, slots=True)
class Place:
    """An upstream; one that ``speaks`` the clients' APIs can be asked for its models."""

    name: str
    speaks: bool = True


@dataclass(frozen=True, slots=True)
class Heard:
    """A whole answer of one upstream."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The body as an object; empty where it is none or the answer is no success."""
        if self.status != 200:
            return {}
        try:
            found = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        return found if isinstance(found, dict) else {}


class Models:
    """Answers for the models of all upstreams; ``default`` is the one that gets the client's own key.

    ``named`` are the models that the configuration names without a glob.
    """

    def __init__(
        self, upstream: Upstream, places: Sequence[Place], default: str, named: Sequence[str], figures: Figures
    ) -> None:
        self._upstream = upstream
        self._places = tuple(places)
        self._default = default
        self._named = tuple(named)
        self._figures = figures

    async def list(self, path_qs: str, headers: Sequence[tuple[str, str]], route: Route) -> Heard:
        """The merged list: each model where a request for it would go. Without any, the default upstream's answer.

        Raises what asking an upstream raises if none has a list and the configuration names no model.
        """
        asked = [place for place in self._places if place.speaks]
        heard = await asyncio.gather(*(self._ask(place, path_qs, headers) for place in asked))
        answers = {place.name: got for place, got in zip(asked, heard, strict=True) if isinstance(got, Heard)}
        entries: dict[str, dict[str, Any]] = {}
        for name, got in answers.items():
            listed = got.document.get("data")
            for entry in listed if isinstance(listed, list) else ():
                model = entry.get("id") if isinstance(entry, dict) else None
                if isinstance(model, str) and _served(route, model) == name:
                    entries.setdefault(model, self._completed(entry))
        anthropic = any(name.lower() == "anthropic-version" for name, _ in headers)
        for model in self._named:
            if model not in entries:
                entries[model] = self._completed(_entry(model, _served(route, model), anthropic=anthropic))
        if not any(got.status == 200 for got in answers.values()) and self._default in answers:
            return answers[self._default]
        failures = [got for got in heard if isinstance(got, UllageError)]
        if not entries and failures and not any(got.status == 200 for got in answers.values()):
            raise failures[0]
        first = next((got.document for got in answers.values() if got.document), {})
        data = list(entries.values())
        document = {"object": "list", **first, "data": data}
        if anthropic:
            document.pop("object")
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            document |= {"has_more": first.get("has_more", False), **ends}
        return _said(document)

    async def one(self, path_qs: str, model: str, headers: Sequence[tuple[str, str]], route: Route) -> Heard:
        """One model, as its own upstream tells of it. Raises ``NotFound``, and what asking raises."""
        model = unquote(model)
        name = route(model)
        place = next((place for place in self._places if place.name == name), Place(name))
        heard = await self._heard(place, path_qs, headers) if place.speaks else None
        if heard is not None and heard.document:
            return _said(self._completed(heard.document), heard.headers)
        if heard is None or (heard.status in (404, 405) and model in self._named):
            if model not in self._named:
                raise NotFound(f"The upstream {name!r} lists no models; name {model!r} under 'models'.")
            anthropic = any(key.lower() == "anthropic-version" for key, _ in headers)
            return _said(self._completed(_entry(model, name, anthropic=anthropic)))
        return heard

    async def _ask(self, place: Place, path_qs: str, headers: Sequence[tuple[str, str]]) -> Heard | UllageError:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._heard(place, path_qs, headers)
        except TimeoutError:
            return UpstreamTimeout(place.name, PATIENCE)
        except UllageError as error:
            return error  # the other upstreams' models are still worth telling

    async def _heard(self, place: Place, path_qs: str, headers: Sequence[tuple[str, str]]) -> Heard:
        # Only the default upstream may see the client's key: it is not known whose it is otherwise.
        left_out = {"accept-encoding"} | (set() if place.name == self._default else CREDENTIALS)
        sent = [pair for pair in headers if pair[0].lower() not in left_out]
        reply = await self._upstream.send(place.name, "GET", path_qs, sent, None)
        try:
            return Heard(reply.status, reply.headers, await _whole(reply))
        finally:
            reply.close()

    def _completed(self, entry: dict[str, Any]) -> dict[str, Any]:
        """*entry* with the figures it lacks."""
        return {**self._figures(str(entry.get("id", ""))), **entry}


def _served(route: Route, model: str) -> str:
    try:
        return route(model)
    except NotFound:
        return ""


async def _whole(reply: ports.Reply) -> bytes:
    parts, size = [], 0
    while (chunk := await reply.next_chunk()) and size <= LARGEST:
        parts.append(chunk)
        size += len(chunk)
    return b"".join(parts)


def _entry(model: str, upstream: str, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": model, "object": "model", "created": 0, "owned_by": upstream}


def _said(document: Mapping[str, Any], headers: Sequence[tuple[str, str]] = ()) -> Heard:
    body = json.dumps(document).encode()
    kept = [pair for pair in headers if not pair[0].lower().startswith("content-")]
    return Heard(200, [*kept, ("content-type", "application/json"), ("content-length", str(len(body)))], body)
