"""Answers ``GET /v1/models``: the models of all upstreams, with the windows that clients read there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from proxy.core.errors import NotFound, UllageError, UpstreamTimeout
from proxy.core.http_headers import CREDENTIALS
from proxy.engine.ports import Upstream
from proxy.engine.replies import read_up_to
from proxy.server.config import Route

PATIENCE: Final = 5.0
"""Seconds an upstream has to list its models; one that takes longer is left out of this answer."""

LARGEST: Final = 8 * 2**20
"""Bytes of a list that are read."""

Figures = Callable[[str], Mapping[str, int]]
"""A model's limits in tokens, by the names clients read them under."""


class ModelsAnswer(msgspec.Struct, frozen=True):
    """A whole answer of one upstream."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The body as an object; empty if it is no object, or if the answer is no success."""
        if self.status != 200:
            return {}
        try:
            document = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        if not isinstance(document, dict):
            return {}
        return document

    @property
    def models(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each model of a list, with its entry."""
        data = self.document.get("data")
        if not isinstance(data, list):
            return
        for entry in data:
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                yield entry["id"], entry


class Models:
    """Answers for the models of all *upstreams*; True for those that speak the clients' APIs and list their models.

    *default* is the upstream that gets the client's own key. *named* are the models that the configuration names
    without a glob.
    """

    def __init__(
        self,
        client: Upstream,
        upstreams: Mapping[str, bool],
        default: str,
        named: Sequence[str],
        figures: Figures,
    ) -> None:
        self._client = client
        self._upstreams = dict(upstreams)
        self._default = default
        self._named = tuple(named)
        self._figures = figures

    async def list(self, path_qs: str, headers: Sequence[tuple[str, str]], route: Route) -> ModelsAnswer:
        """Return the merged list: each model once, from the upstream that a request for it would go to.

        If no upstream has a list, return the default one's answer. Raises the first upstream's ``UllageError`` if none
        answers and the configuration names no model.
        """
        answers, failures = await self._ask_all(path_qs, headers)
        if not any(answer.status == 200 for answer in answers.values()):
            if self._default in answers:
                return answers[self._default]
            if failures and not self._named:
                raise failures[0]
        anthropic = _is_anthropic(headers)
        entries = self._listed(answers, route)
        for model in self._named:
            if model not in entries:
                entries[model] = self._completed(_entry(model, _served(route, model), anthropic=anthropic))
        first = next((answer.document for answer in answers.values() if answer.document), {})
        return _json_answer(_list_document(first, list(entries.values()), anthropic=anthropic))

    async def _ask_all(
        self, path_qs: str, headers: Sequence[tuple[str, str]]
    ) -> tuple[dict[str, ModelsAnswer], Sequence[UllageError]]:
        """Ask every upstream for its list; return the answers by upstream, and the errors of those without one."""
        speaking = [name for name, speaks in self._upstreams.items() if speaks]
        results = await asyncio.gather(*(self._ask(name, path_qs, headers) for name in speaking))
        answers = {
            name: result for name, result in zip(speaking, results, strict=True) if isinstance(result, ModelsAnswer)
        }
        return answers, [result for result in results if isinstance(result, UllageError)]

    def _listed(self, answers: Mapping[str, ModelsAnswer], route: Route) -> dict[str, dict[str, Any]]:
        """Return the models that upstreams list by name, without those that a request would send elsewhere."""
        entries: dict[str, dict[str, Any]] = {}
        for name, answer in answers.items():
            for model, entry in answer.models:
                if _served(route, model) == name:
                    entries.setdefault(model, self._completed(entry))
        return entries

    async def one(self, path_qs: str, model: str, headers: Sequence[tuple[str, str]], route: Route) -> ModelsAnswer:
        """Return one model, as its own upstream describes it. Raises ``UllageError``."""
        model = unquote(model)
        name = route(model)
        answer = None
        if self._upstreams.get(name, True):
            answer = await self._fetch(name, path_qs, headers)
        if answer is not None and answer.document:
            return _json_answer(self._completed(answer.document), answer.headers)
        if answer is None or (answer.status in (404, 405) and model in self._named):
            if model not in self._named:
                raise NotFound(f"The upstream {name!r} lists no models; name {model!r} under 'models'.")
            return _json_answer(self._completed(_entry(model, name, anthropic=_is_anthropic(headers))))
        return answer

    async def _ask(self, upstream: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> ModelsAnswer | UllageError:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._fetch(upstream, path_qs, headers)
        except TimeoutError:
            return UpstreamTimeout(upstream, PATIENCE)
        except UllageError as error:
            return error  # the other upstreams' models are listed all the same

    async def _fetch(self, upstream: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> ModelsAnswer:
        left_out = {"accept-encoding"}  # the list is read here, so it has to come without a content coding
        if upstream != self._default:
            # The client's key belongs to the default upstream: no other one may see it.
            left_out |= CREDENTIALS
        sent = [pair for pair in headers if pair[0].lower() not in left_out]
        reply = await self._client.send(upstream, "GET", path_qs, sent, None)
        try:
            chunks: list[bytes] = []
            await read_up_to(reply, chunks, LARGEST)
            return ModelsAnswer(reply.status, reply.headers, b"".join(chunks))
        finally:
            reply.close()

    def _completed(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return *entry* with the model's limits; figures that the upstream states win."""
        return {**self._figures(str(entry.get("id", ""))), **entry}


def _is_anthropic(headers: Sequence[tuple[str, str]]) -> bool:
    """True if the client expects Anthropic's form of a list."""
    return any(name.lower() == "anthropic-version" for name, _ in headers)


def _served(route: Route, model: str) -> str:
    try:
        return route(model)
    except NotFound:
        return ""


def _entry(model: str, upstream: str, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": model, "object": "model", "created": 0, "owned_by": upstream}


def _list_document(first: Mapping[str, Any], data: Sequence[Mapping[str, Any]], *, anthropic: bool) -> dict[str, Any]:
    """Return a list of models, with the other members of the *first* upstream's list.

    Anthropic's list has members of its own: https://platform.claude.com/docs/en/api/resources/beta/subresources/models/methods/list
    """
    document = {"object": "list", **first, "data": data}
    if not anthropic:
        return document
    document.pop("object")
    document["has_more"] = first.get("has_more", False)
    if data:
        document |= {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return document


def _json_answer(document: Mapping[str, Any], headers: Sequence[tuple[str, str]] = ()) -> ModelsAnswer:
    body = json.dumps(document).encode()
    others = [pair for pair in headers if not pair[0].lower().startswith("content-")]
    return ModelsAnswer(200, [*others, ("content-type", "application/json"), ("content-length", str(len(body)))], body)
