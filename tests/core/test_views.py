"""Views: what is sent, held against what it was made of."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.core.decisions import CountedView, LookedUp, Written, verbatim
from proxy.core.planner import build_view
from proxy.core.views import client_compaction_view
from tests.core.test_planner import LONG, PLANNING, SHORT, measured


def test_without_a_record_the_view_is_the_clients_own_bytes() -> None:
    """Byte for byte, with nothing edited."""
    request = measured(SHORT)
    view = build_view(request, Written(LookedUp(request.lay_out(), None), request.target, None, None))
    assert view.body == request.request.body
    assert view.edits.is_verbatim
    assert view.counted == request.counts.total


@pytest.mark.parametrize("lowered", [None, 700])
def test_a_lowered_output_figure_is_the_only_edit(lowered: int | None) -> None:
    """The member that states it changes, and no other byte."""
    request = measured(SHORT, max_tokens=900)
    view = build_view(request, Written(LookedUp(request.lay_out(), None), request.target, None, lowered))
    figure = b"700" if lowered else b"900"
    assert view.body == request.request.body.replace(b'"max_tokens":900', b'"max_tokens":' + figure)


def test_a_clients_own_compaction_that_fits_changes_nothing() -> None:
    """What the model reads now is all that will be left of the conversation."""
    request = structs.replace(measured(SHORT), client_compaction="other")
    view = client_compaction_view(request, PLANNING)
    assert isinstance(view, CountedView)
    assert view.body == request.request.body


def test_a_clients_own_compaction_loses_its_oldest_results_first() -> None:
    """Above the window results give way from the beginning, and the newest items stay as they are."""
    request = structs.replace(measured(LONG, window=10_000), client_compaction="other")
    view = client_compaction_view(request, PLANNING)
    assert isinstance(view, CountedView)
    assert view.counted < request.counts.total
    assert request.parsed.item(len(request.parsed.items) - 1) in view.body


def test_the_providers_own_count_is_expected_before_ours() -> None:
    """Without an anchor the ratio of its tokens to ours is all there is."""
    assert measured(SHORT, ratio=1.5).expected_tokens(-1, 100) == 150
    assert verbatim(measured(SHORT), None).expected_tokens == measured(SHORT).counts.total
