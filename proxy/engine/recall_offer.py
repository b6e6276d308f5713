"""What a view that offers the recall tool says and weighs more than one that does not."""

from __future__ import annotations

import msgspec

from proxy.core.apis.envelope import Envelope
from proxy.core.decisions import NO_ADDITION, Addition
from proxy.core.models import Route
from proxy.core.recall.tool import MENTION, added, declaration, may_offer
from proxy.core.tokens.tools import FRAME, PARALLEL, reads_declarations
from proxy.engine.reading import Reader

PART = 16
"""The tool may take one token in so many of the window."""


def tokens(reader: Reader, api: str, outline: Envelope, route: Route, window: int) -> int:
    """Tokens that the tool adds to a request with this *outline*; zero where it may not be offered."""
    if not may_offer(api, outline):
        return 0
    own = reader.tokens_of_tools(f"[{declaration(api)}]", route.encoding, route.model)
    if reads_declarations(route.model):
        given = msgspec.json.decode(outline.value("tools"), type=list[msgspec.Raw])
        own += (PARALLEL if len(given) == 1 else 0) - FRAME
    return own if own * PART <= window else 0


def addition(api: str, outline: Envelope, smaller: str, tokens: int) -> Addition:
    """The tool behind the client's own, or behind those made *smaller*, and the note on it; nothing for no *tokens*."""
    if not tokens:
        return NO_ADDITION
    return Addition(added(api, smaller or outline.value("tools")), MENTION, tokens)
