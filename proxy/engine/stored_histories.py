"""What upstreams refused of histories that only they have, so that they are not sent the same in vain.

A request with ``previous_response_id`` or ``conversation`` continues a history that the provider stores: nothing of it
can be folded here. The first request that is too long with it is refused, and sent again with ``truncation: auto`` if
the client set no other value. What follows is known from then on, by the name of the response or conversation:

    known of the name                      the next request that continues it
    nothing                                goes as the client sent it
    refused, and truncated since           goes with ``truncation: auto``, and so does what continues its answer
    refused, and nothing is left to try    is refused here with what the client can do, unless it is smaller

A process notes it for itself, for an hour: another one learns it by one more refusal.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from cachebox import TTLCache

from proxy.core.apis.envelope import STORED, Envelope
from proxy.core.decisions import View
from proxy.core.errors import StoredHistoryTooLong
from proxy.core.overflow.kinds import Overflow
from proxy.engine.body_edits import with_truncation
from proxy.engine.reading import LocatedBody

_MOST, _SECONDS = 4096, 3600.0
"""Names that are noted at most, and the seconds for which each is."""

_ID: Final = re.compile(rb'"id"\s*:\s*("resp_[^"\\]{1,200}")')
"""The id of a response, in the first event of a stream or the first member of an answer.

https://platform.openai.com/docs/api-reference/responses/object
"""

_Name = tuple[bytes, str, str, str, str]
"""Tenant and route; the JSON of ``previous_response_id``, ``conversation`` and ``truncation``, empty if not set."""


class _Refused(msgspec.Struct, frozen=True):
    """A refusal of a body of ``size`` bytes, with ``output`` as its figure; ``is_final``: nothing is left to try."""

    size: int
    output: int | None
    is_final: bool


class StoredHistories:
    """Notes which stored histories were too long, for each tenant and route."""

    def __init__(self) -> None:
        self._refused: TTLCache[_Name, _Refused] = TTLCache(_MOST, _SECONDS)

    def refused(self, view: View, located: LocatedBody, overflow: Overflow, *, is_final: bool) -> None:
        """Note that *view*, whose client's body is *located*, was refused with *overflow*."""
        has_figures = overflow.prompt is not None and overflow.limit is not None and overflow.prompt > overflow.limit
        if is_final and not overflow.decisive and not has_figures:
            return  # no request is refused on a guess: a code says so, or figures do
        envelope = located.envelope
        size = len(view.request.body)
        self._refused[_name(view, envelope)] = _Refused(size, envelope.requested_output, is_final)

    def as_accepted(self, view: View, located: LocatedBody) -> View:
        """Return *view* as its upstream may accept it. Raises ``StoredHistoryTooLong`` if it is known not to."""
        refused: _Refused | None = self._refused.get(_name(view, located.envelope), None)
        if refused is None:
            return view
        if not refused.is_final:
            return with_truncation(located, view) or view
        output = located.envelope.requested_output
        if len(view.request.body) >= refused.size and output == refused.output:
            raise StoredHistoryTooLong(view.known.route.upstream)
        return view

    def answered(self, view: View, located: LocatedBody, head: bytes) -> None:
        """Note the response that the answer to *view* begins in *head*, if its history was truncated."""
        refused: _Refused | None = self._refused.get(_name(view, located.envelope), None)
        created = _ID.search(head)
        if refused is None or refused.is_final or created is None:
            return
        tenant, route, _, conversation, truncation = _name(view, located.envelope)
        self._refused[tenant, route, created[1].decode("utf-8", "replace"), conversation, truncation] = refused


def _name(view: View, envelope: Envelope) -> _Name:
    """Return the name of the history that *view* continues; what the client set as ``truncation`` is part of it."""
    before, conversation = map(envelope.value_or_nothing, STORED)
    truncation = envelope.value_or_nothing("truncation")
    return view.request.tenant, view.known.route.learned_key, before, conversation, truncation
