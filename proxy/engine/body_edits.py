"""A request's body with something beside its conversation changed: its model's name, its output figure, a field."""

from __future__ import annotations

import json

from msgspec import structs

from proxy.core.apis.envelope import Envelope, splice
from proxy.core.apis.portable import MEMBERS_WITHOUT_REASONING, PORTABLE, SEALED_HINT
from proxy.core.decisions import API_FORMATS, CountedView, UncountedView, View
from proxy.core.request import Request
from proxy.core.tokens.budget import input_limit, to_our_tokens
from proxy.engine.reading import LocatedBody

_DIGITS = 20
"""Digits of an output figure that are read: as many are above any limit, whatever follows them."""


def rerouted(request: Request, located: LocatedBody, model: str) -> bytes:
    """The body of *request* for another *model*: its name, and no reasoning that only its author can read.

    A model that the path names stays out of the body.
    """
    body, envelope, where = located.body, located.envelope, located.scan
    edits = {"model": json.dumps(model)}
    items = _portable_items(request.api, located)
    if items != body[where.start : where.end]:
        edits |= MEMBERS_WITHOUT_REASONING.get(request.api, {})
    at = len(body[: where.start].decode())
    edited = splice(envelope, at, items, {key: value for key, value in edits.items() if key in envelope.fields})
    if "model" in envelope.fields or request.path_model:
        return edited
    return edited.replace(b"{", b'{"model":' + edits["model"].encode() + b",", 1)


def _portable_items(api: str, located: LocatedBody) -> bytes:
    """The items without what only its author can read; the client's own bytes if there is nothing of that kind."""
    body, where = located.body, located.scan
    items = body[where.start : where.end]
    if not SEALED_HINT.search(items):
        return items
    originals = [body[start:end] for start, end in where.spans]
    portable = list(originals)
    for index, item in enumerate(originals):
        if SEALED_HINT.search(item):
            portable[index] = PORTABLE[api](item)
    if portable == originals:
        return items
    return b",".join(filter(None, portable))


def renamed(body: bytes, located: LocatedBody, model: str) -> bytes:
    """*body* with another name of its model, and every other byte as it is."""
    name = json.dumps(model).encode()
    text, where = located.envelope.text, located.envelope.fields.get("model")
    if where is None:
        return body
    # The items stand either behind the name or before it; from the other end the envelope is the body.
    if where.start < len(located.body[: located.scan.start].decode()):
        start = len(text[: where.start].encode())
        end = start + len(text[where.start : where.end].encode())
    else:
        end = len(body) - len(text[where.end :].encode())
        start = end - len(text[where.start : where.end].encode())
    return body[:start] + name + body[end:]


def with_lower_output(located: LocatedBody, view: View, most: int) -> View | None:
    """*view*, whose body is *located*, with output figures above *most* provider tokens lowered to it; else None."""
    envelope, (start, end) = located.envelope, (located.scan.start, located.scan.end)
    figures = _figures_above(envelope, view.request.api, most)
    if not figures:
        return None
    thinking = envelope.thinking(most)
    body = splice(envelope, len(view.body[:start].decode()), view.body[start:end], figures | thinking)
    stages: tuple[str, ...] = ("output",)
    if thinking:
        stages = ("output", "thinking")
    if isinstance(view, CountedView):
        lowered = to_our_tokens(most, view.known.token_ratio)
        view = structs.replace(view, edits=structs.replace(view.edits, lowered_output=lowered))
    else:
        budget = None
        if view.known.window is not None and not view.is_off:
            budget = max(0, input_limit(view.known.window, most, view.known.route.max_input))
        view = structs.replace(view, lowered_output=most, budget=budget)
    return _edited(view, body, stages)


def _figures_above(envelope: Envelope, api: str, most: int) -> dict[str, str]:
    """The members that state an output figure above *most*, lowered to it."""
    figures = {key: envelope.value(key) for key in API_FORMATS[api].OUTPUT_FIGURES if key in envelope.fields}
    return {key: str(most) for key, value in figures.items() if value.isdecimal() and int(value[:_DIGITS]) > most}


def with_truncation(located: LocatedBody, view: View) -> View | None:
    """*view* with leave for the provider to cut the history that only it has; None if it has that already."""
    if "truncation" in located.envelope.fields or "truncation" in _stages_of(view):
        return None
    at = view.body.index(b"{") + 1
    body = view.body[:at] + b'"truncation":"auto",' + view.body[at:]
    return _edited(view, body, ("truncation",))


def _stages_of(view: View) -> tuple[str, ...]:
    """The stages that made *view*."""
    if isinstance(view, UncountedView):
        return view.stages
    return view.edits.stages


def _edited(view: View, body: bytes, stages: tuple[str, ...]) -> View:
    """*view* with another *body*, and *stages* behind those that made it."""
    stages = tuple(dict.fromkeys((*_stages_of(view), *stages)))
    if isinstance(view, UncountedView):
        return structs.replace(view, body=body, stages=stages)
    return structs.replace(view, body=body, edits=structs.replace(view.edits, stages=stages))
