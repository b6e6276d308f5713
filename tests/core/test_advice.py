"""Advice: what fills a view, and what to do about it."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from proxy.core.advice import (
    LONGEST_TARGET,
    REMEDIES,
    WORDS,
    Advice,
    Part,
    advise,
    item_parts,
    main_part,
)
from proxy.core.decisions import NeedBlock, verbatim
from proxy.core.planner import build_view, decide
from proxy.core.tokens.budget import REGIONS
from proxy.engine.run import report_of
from tests.core.test_planner import LONG, PLANNING, looked_up, measured, written
from tests.support.engine_fixtures import tool_map_of_package
from tests.support.sample_conversations import log, prose

TOOLS = tool_map_of_package()


def calling(name: str, arguments: dict[str, str], result: str) -> list[dict]:
    """A task, one call of a tool, and its result."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    answer = {"role": "tool", "tool_call_id": "c1", "content": result}
    return [{"role": "user", "content": "Look at the bundle."}, call, answer]


def advice_of(messages: list[dict], **members: object) -> Advice | None:
    """The advice for *messages* as they are."""
    request = measured(messages, **members)
    view = verbatim(request, request.lay_out())
    return advise(view, report_of(view, PLANNING), TOOLS)


def test_one_large_result_is_named_with_its_call() -> None:
    """The advice has the tool, the path, and the share of the input."""
    advice = advice_of(calling("read_file", {"path": "dist/bundle.js"}, log(1, 3000)))
    assert advice is not None
    assert (advice.kind, advice.tool, advice.target) == ("tool result", "read_file", "dist/bundle.js")
    assert advice.share > 0.9
    assert advice.sentence() == f"{100 * advice.share:.0f} % is one tool result: read_file dist/bundle.js"
    assert "truncate.always" in advice.remedy


def test_the_target_is_left_out_if_content_may_not_be_shown() -> None:
    """The name of the tool stays: it is no content."""
    advice = Advice("tool result", 0.62, 620, "read_file", "dist/bundle.js")
    assert advice.sentence(targets=False) == "62 % is one tool result: read_file"


def test_a_long_target_keeps_its_end() -> None:
    """There a path has its file; and it stays on one line."""
    advice = advice_of(calling("read_file", {"path": "a/" * 200 + "end.py"}, log(1, 3000)))
    assert advice is not None
    assert advice.target.startswith("…")
    assert advice.target.endswith("a/end.py")
    assert len(advice.target) == LONGEST_TARGET


def test_a_result_without_its_call_has_no_name() -> None:
    """In a history that its client has cut, a result may stand without its call."""
    call, result = calling("read_file", {"path": "x"}, log(1, 3000))[1:]
    call["tool_calls"][0]["id"] = "another"
    advice = advice_of([{"role": "user", "content": "Go."}, call, result])
    assert advice is not None
    assert (advice.kind, advice.tool, advice.target) == ("tool result", "", "")


def test_large_system_text_is_more_than_the_largest_message() -> None:
    """It goes with every request."""
    advice = advice_of([{"role": "system", "content": prose(1, 4000)}, {"role": "user", "content": prose(2, 2000)}])
    assert advice is not None
    assert advice.kind == "system"


def test_many_small_results_are_named_together() -> None:
    """If no single part is large, the advice names the largest region."""
    advice = advice_of(LONG)
    assert advice is not None
    assert advice.kind == "tool"
    assert advice.sentence().endswith("% are tool results")


def test_what_was_folded_or_cut_is_no_part_of_the_view() -> None:
    """Advice is about what went upstream."""
    request = measured(LONG)
    need = decide(request, PLANNING, looked_up(request))
    assert isinstance(need, NeedBlock)
    view = build_view(request, written(request, need))
    cut = need.compaction.cut
    assert cut > 0
    parts = list(item_parts(view, least=0))
    assert parts
    assert min(part.index for part in parts) >= cut
    assert view.edits.record is not None
    record = structs.replace(view.edits.record, edits={parts[0].index: b"{}"})
    assert (
        list(item_parts(structs.replace(view, edits=structs.replace(view.edits, record=record)), least=0)) == parts[1:]
    )


@pytest.mark.parametrize("total", [0, 100])
def test_without_figures_there_is_no_advice(total: int) -> None:
    """A request that was not counted has no regions."""
    assert main_part({}, [], total) is None
    assert main_part({"reserve": 50}, [], total) is None


def test_the_room_for_the_answer_fills_nothing() -> None:
    """However large it is, it is no part of the input."""
    assert main_part({"reserve": 90, "user": 10}, [], 10) == Part("user", 10)


def test_each_region_has_its_words_and_its_remedy() -> None:
    """A region without them would be a fault behind an answer."""
    assert set(REGIONS) - {"reserve"} <= set(WORDS)
    assert set(WORDS) == set(REMEDIES)


def test_the_block_is_named_if_nothing_is_larger() -> None:
    """It stands for history: a quarter of a view is no news while tool results take half of it."""
    assert main_part({"summary": 30, "tool": 50, "reserve": 10}, [], 80) == Part("tool", 50)
    assert main_part({"summary": 50, "tool": 30, "reserve": 10}, [], 80) == Part("summary", 50)
