"""The body of a request for a view, and of the answer to it.

The members beside our own are those of the API that the items belong to; their bytes stay as they are. The answer has
the members of the view, and figures under the names of Headroom's ``/v1/compress``, which gateways call
(https://docs.litellm.ai/docs/proxy/headroom, https://portkey.ai/docs/integrations/guardrails/headroom).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from proxy.core.apis.json_scan import members as members_in
from proxy.core.apis.json_scan import reject_duplicates
from proxy.core.apis.json_steps import UNREADABLE, decode
from proxy.core.apis.shape import shape_of
from proxy.core.errors import InvalidRequest
from proxy.core.report import Report

OPTIONS: Final = ("api", "window", "target", "keep_items")
"""Our own members of a request; they are no part of the view."""

FIGURES: Final = (
    "outcome", "reason", "stages", "window", "tokens_before", "tokens_after", "tokens_saved", "compression_ratio",
    "transforms_applied", "conversation",
)  # fmt: skip
"""Our own members of an answer. Members of a request with these names are left out of its view."""

APIS: Final = ("chat", "messages", "responses")

MOST_TOKENS: Final = 999_999_999
"""The largest number of tokens that may be given: far more than any window has."""

_ITEMS: Final = {"chat": "messages", "messages": "messages", "responses": "input"}


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """A request for a view: the ``api`` of its ``body``, and the options beside it.

    ``window`` is the most that the model's window may be, ``target`` the most that the view may take, in the provider's
    tokens; ``share`` is the share of the room to compact to now. ``keep_items``: no item is left out, so that the view
    has as many; None if the request does not say.
    """

    api: str
    body: bytes = field(repr=False)
    window: int | None
    target: int | None
    share: float | None
    keep_items: bool | None


class UnusableBody(InvalidRequest):
    """The body is no request for a view; ``api`` is the one whose error shape its caller understands."""

    def __init__(self, message: str, api: str = "chat") -> None:
        super().__init__(message)
        self.api = api


def read_body(body: bytes) -> ViewRequest:
    """Return the request in *body*. Raises ``UnusableBody``."""
    try:
        reject_duplicates(members_in(body.decode()))
        members = _members_of(body)
        options: dict[str, Any] = {name: msgspec.json.decode(members.pop(name)) for name in OPTIONS if name in members}
        shape = shape_of(_significant(members))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnusableBody(f"The body is no JSON object: {error}.") from error
    except InvalidRequest as error:
        raise UnusableBody(error.message) from error
    api = options.get("api", shape)
    if api not in APIS:
        raise UnusableBody("Send messages (Chat Completions or Messages) or input (Responses): a list of items.")
    if _ITEMS[api] not in members:
        raise UnusableBody(f"A request of the API {api} has {_ITEMS[api]}: a list of items.", api)
    for name in FIGURES:
        members.pop(name, None)
    keep_items = options.get("keep_items")
    if keep_items is not None and not isinstance(keep_items, bool):
        raise UnusableBody("keep_items is true or false.", api)
    share = _share(options, api)
    target = None
    if share is None:
        target = _tokens(options, "target", api)
    return ViewRequest(
        api,
        msgspec.json.encode(members),
        _tokens(options, "window", api),
        target,
        share,
        keep_items,
    )


def _members_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of *body*, each as its bytes. Raises ``ValueError`` and ``RecursionError``."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:  # for example a text that was cut inside a character
        text = body.decode()
        return {field.key: msgspec.Raw(text[field.start : field.end].encode()) for field in members_in(text)}


def _share(options: Mapping[str, Any], api: str) -> float | None:
    """Return ``target`` if it is a share of the room; None if it is a number of tokens or missing."""
    target = options.get("target")
    if not isinstance(target, float) or target.is_integer():
        return None
    if not 0 < target < 1:
        raise UnusableBody("target is a whole number of tokens, or a share of the room between 0 and 1.", api)
    return target


def _significant(members: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return the *members* by which the API is recognised, decoded."""
    names = ("messages", "input", "system", "anthropic_version", "tools")
    return {name: decode(bytes(members[name])) for name in names if name in members}


def _tokens(options: Mapping[str, Any], name: str, api: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    is_whole = isinstance(value, int | float) and value == int(value)
    if isinstance(value, bool) or not is_whole or not 1 <= value <= MOST_TOKENS:
        raise UnusableBody(f"{name} is a whole number of tokens between 1 and {MOST_TOKENS}.", api)
    return int(value)


def answer_body(view: bytes, report: Report) -> bytes:
    """Return the answer: the members of *view* with their bytes, and the figures of *report*."""
    before, after = report.tokens_before or 0, report.tokens_after or 0
    ratio = 1.0
    if before:
        ratio = round(after / before, 4)
    figures: dict[str, object] = {
        "outcome": report.outcome,
        "reason": report.reason,
        "stages": report.stages,
        "window": report.window,
        "tokens_before": before,
        "tokens_after": after,
        "tokens_saved": report.tokens_removed,
        "compression_ratio": ratio,
        "transforms_applied": report.stages,
        "conversation": report.conversation,
    }
    members: dict[str, object] = dict(_members_of(view))
    return msgspec.json.encode(members | figures)
