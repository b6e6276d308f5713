"""What the recall tool can show: every item of the client's history, by number."""

from __future__ import annotations

import json

from proxy.core.decisions import CountedView
from proxy.features.recall.pieces import LABEL_CHARACTERS, pieces_of
from tests.support.api_formats import request_body
from tests.support.engine_fixtures import Replica
from tests.support.recall_fixtures import SAID, WINDOW, long_history
from tests.support.sample_conversations import AGENT_TOOLS
from tests.support.server_tool_fixtures import every


async def view_of(api: str, window: int = WINDOW) -> CountedView:
    body = json.dumps(request_body(api, long_history(), AGENT_TOOLS)).encode()
    return (await Replica().plan(body, window, api=api, model="gpt-4o-mini")).view


@every
async def test_every_item_is_there_and_says_if_the_view_lacks_it(api: str) -> None:
    """Numbers count the items of the client's own body; what was folded or edited is hidden, the newest is not."""
    view = await view_of(api)
    pieces = pieces_of(view)
    assert [piece.number for piece in pieces] == sorted({piece.number for piece in pieces})
    hidden = [piece for piece in pieces if piece.hidden]
    assert any(SAID in piece.text for piece in hidden)
    assert not pieces[-1].hidden
    assert not any(piece.label == "system" for piece in pieces)


@every
async def test_a_result_is_labelled_with_its_call(api: str) -> None:
    """The heading names the call, cut to a line."""
    pieces = pieces_of(await view_of(api))
    labels = [piece.label for piece in pieces if piece.label.startswith("result of ")]
    assert labels
    assert all("(" in label and len(label) <= LABEL_CHARACTERS + len("result of ") for label in labels)


@every
async def test_a_view_that_lacks_nothing_hides_nothing(api: str) -> None:
    """Without a compaction every item is in the view."""
    assert not any(piece.hidden for piece in pieces_of(await view_of(api, 200_000)))
