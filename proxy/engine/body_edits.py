"""Edits of a body around its conversation: the model's name, the output figure, another field."""

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
"""Digits of an output figure that are compared: a figure with more is above any limit."""


def rerouted(request: Request, located: LocatedBody, model: str) -> bytes:
    """Return the body of *request* for another *model*: with its name, and without reasoning that it cannot read.

    If the path names the model, none is added to the body.
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
    """Return the items without sealed reasoning, which other models cannot read; the same bytes if there is none."""
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
    """Return *body* with another name of its model; every other byte stays as it is."""
    name = json.dumps(model).encode()
    text, where = located.envelope.text, located.envelope.fields.get("model")
    if where is None:
        return body
    # The envelope is the body without its items. If the name precedes the items, its offset from the beginning is the
    # same in both; else its offset from the end is.
    if where.start < len(located.body[: located.scan.start].decode()):
        start = len(text[: where.start].encode())
        end = start + len(text[where.start : where.end].encode())
    else:
        end = len(body) - len(text[where.end :].encode())
        start = end - len(text[where.start : where.end].encode())
    return body[:start] + name + body[end:]


def with_lower_output(located: LocatedBody, view: View, most: int) -> View | None:
    """Return *view*, whose body is *located*, with output figures lowered to *most* provider tokens.

    None if no figure is above that.
    """
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
    """Return the members that state an output figure above *most*, lowered to it."""
    figures = {key: envelope.value(key) for key in API_FORMATS[api].OUTPUT_FIGURES if key in envelope.fields}
    return {key: str(most) for key, value in figures.items() if value.isdecimal() and int(value[:_DIGITS]) > most}


def with_truncation(located: LocatedBody, view: View) -> View | None:
    """Return *view* with ``truncation: auto``: the provider may cut the history that only it has.

    None if the body has that member already. https://platform.openai.com/docs/api-reference/responses/create
    """
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
    """Return *view* with another *body*, and *stages* appended to its own."""
    stages = tuple(dict.fromkeys((*_stages_of(view), *stages)))
    if isinstance(view, UncountedView):
        return structs.replace(view, body=body, stages=stages)
    return structs.replace(view, body=body, edits=structs.replace(view.edits, stages=stages))
