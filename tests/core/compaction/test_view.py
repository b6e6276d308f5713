"""Views: the client's own bytes but for the carrier and what was clipped, valid wherever the cut is."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proxy.core.apis import chat, messages
from proxy.core.apis.json_scan import scan
from proxy.core.compaction.block import HEADER
from proxy.core.compaction.digest import BEGINNINGS
from proxy.core.compaction.record import Compaction, Placeholder, PlaceholderReason
from proxy.core.compaction.truncate import MIDDLE
from proxy.core.compaction.view import OriginalItems, assemble, write_texts
from proxy.core.conversation import ItemText, lay_out
from tests.support.api_formats import text_of
from tests.support.conversation_strategies import conversations, encode
from tests.support.engine_fixtures import (
    UNSHRUNK,
    Message,
    chat_body,
    count_tokens,
    message_slices,
    read_one,
    tool_map_of_package,
)
from tests.support.plan_checks import message_problems

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # else it hides what failed

SYSTEM = {"role": "system", "content": "Be brief."}
TASK = {"role": "user", "content": 'Fix caf\u00e9.py, "please".'}
SPOKEN = {"role": "assistant", "content": "On it.", "x": [1.0]}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "run", "arguments": '{"command": "make"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "done"}
NEWER = {"role": "user", "content": [{"type": "text", "text": "And now?"}], "name": "ann"}


def raw_of(body: bytes) -> OriginalItems:
    where = scan(body, "messages")
    items = [chat.read_item(body[start:end], count_tokens) for start, end in where.spans]
    return OriginalItems(body, where.spans, items, lay_out(items), chat)


def view_of(original: OriginalItems, compaction: Compaction) -> tuple[str, bytes, int]:
    """The block, the body with the view in place of the messages, and the view's weight."""
    block, edits = write_texts(original, compaction, count_tokens, tool_map_of_package())
    made = assemble(original, compaction, block, edits, lambda raw: original.api.read_item(raw, count_tokens), note="")
    where = scan(original.body, "messages")
    return block, original.body[: where.start] + made.content + original.body[where.end :], made.tokens


def fold(original: OriginalItems, cut: int, clips: tuple[tuple[int, int], ...] = ()) -> Compaction:
    boundary = len(original.items)
    return Compaction(boundary, cut, 400, 200, original.layout.verbatim_users(boundary, cut), clips)


@settings(max_examples=80, phases=UNSHRUNK)
@given(st.data())
@pytest.mark.slow
def test_any_cut_gives_a_faithful_view(data: st.DataObject) -> None:
    """At any cut and with any clips: the client's own bytes, whole pairs, one carrier, and a true token count."""
    messages = data.draw(conversations(with_orphans=True, surrogates=False, max_size=14))
    body = encode(data.draw, {"model": "m", "messages": messages})
    original = raw_of(body)
    cuts = [cut for cut in original.layout.cuts if cut]
    assume(cuts)
    cut = data.draw(st.sampled_from(cuts))
    kept = [i for i, item in enumerate(original.items) if i >= cut and item.role != "system"]
    clips = {i: original.items[i].media + 48 for i in data.draw(st.lists(st.sampled_from(kept), max_size=3))}
    compaction = fold(original, cut, tuple(sorted((i, t) for i, t in clips.items() if t < original.items[i].tokens)))
    block, view, tokens = view_of(original, compaction)
    assert message_problems(body, view) == []
    assert HEADER in block
    assert tokens == sum(item.tokens for item in raw_of(view).items)
    assert view_of(original, compaction) == (block, view, tokens)


def test_a_tail_that_begins_with_the_model_is_carried_by_the_task() -> None:
    """The block stands behind the task's own words, and the item's other members and bytes stay."""
    body = chat_body([SYSTEM, TASK, SPOKEN, CALL, RESULT])
    block, view, _ = view_of(raw_of(body), fold(raw_of(body), 3))
    system, carrier, *tail = message_slices(view)
    assert [system, *tail] == [message_slices(body)[0], *message_slices(body)[3:]]
    own = message_slices(body)[1][:-2]
    assert carrier.startswith(own)
    assert json.loads(carrier)["content"] == f"{TASK['content']}\n\n{block}"
    assert text_of(TASK) not in block


def test_a_tail_that_begins_with_a_user_is_carried_by_it() -> None:
    """The block stands before the user's own words and holds the first task verbatim."""
    body = chat_body([SYSTEM, TASK, SPOKEN, NEWER, CALL, RESULT])
    block, view, _ = view_of(raw_of(body), fold(raw_of(body), 3))
    carrier = json.loads(message_slices(view)[1])
    assert carrier == {**NEWER, "content": [{"type": "text", "text": block}, NEWER["content"][0]]}
    assert text_of(TASK) in block
    assert message_slices(view)[2:] == message_slices(body)[4:]


def test_a_view_without_a_block_gets_no_note() -> None:
    """A note is the last line of the block; a view without one gets none."""
    original = raw_of(chat_body([TASK, SPOKEN, NEWER]))
    compaction = fold(original, 2)

    def content(block: str, note: str) -> bytes:
        read_item = functools.partial(original.api.read_item, count=count_tokens)
        return assemble(original, compaction, block, {}, read_item, note).content

    assert b"what was\\nask me" in content("what was", "ask me")
    assert content("", "ask me") == content("", "")


def test_the_newest_user_text_is_never_folded_away() -> None:
    """If a long run of rounds follows it, the newest user text stands verbatim in the block."""
    messages = [TASK, SPOKEN, NEWER, *[SPOKEN, CALL, RESULT] * 3]
    body = chat_body(messages)
    original = raw_of(body)
    block, view, _ = view_of(original, fold(original, original.layout.cuts[-1]))
    assert f"word for word:\n{text_of(NEWER)}" in block
    assert text_of(TASK) in text_of(json.loads(message_slices(view)[0]))


def test_a_conversation_without_a_user_gets_a_carrier() -> None:
    """If no user item can carry the block, a user item of our own does."""
    body = chat_body([SYSTEM, SPOKEN, CALL, RESULT, CALL, RESULT])
    original = raw_of(body)
    block, view, _ = view_of(original, fold(original, 4))
    assert json.loads(message_slices(view)[1]) == {"role": "user", "content": block}


def test_system_messages_in_the_middle_stay() -> None:
    """Every system message, folded past or not, is there in order, byte for byte."""
    later = {"role": "developer", "content": [{"type": "text", "text": "From now on in French."}]}
    body = chat_body([SYSTEM, TASK, SPOKEN, later, NEWER, later, CALL, RESULT])
    original = raw_of(body)
    _, view, _ = view_of(original, fold(original, 6))
    roles = [json.loads(piece)["role"] for piece in message_slices(view)]
    assert roles == ["system", "developer", "developer", "user", "assistant", "tool"]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "image_url", "image_url": {"url": "https://e.org/x"}}]])
def test_an_odd_task_can_carry(content: Any) -> None:
    """A task without text, or without content at all, still carries the block."""
    task: Message = {"role": "user", "content": content}
    body = chat_body([task, SPOKEN, CALL, RESULT, SPOKEN])
    original = raw_of(body)
    block, view, _ = view_of(original, fold(original, 1))
    carrier = json.loads(message_slices(view)[0])
    assert block in text_of(carrier)
    if content:
        assert content[0] in carrier["content"]


def test_a_clip_keeps_names_ids_and_json() -> None:
    """A clipped call keeps its id, its name and valid JSON arguments; its result keeps its id."""
    arguments = {"path": "src/a.py", "content": "word " * 3000, "lines": [1, 2]}
    function = {"name": "write", "arguments": json.dumps(arguments)}
    call = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    body = chat_body([TASK, call, {**RESULT, "content": "line\n" * 3000}])
    original = raw_of(body)
    _, view, tokens = view_of(original, Compaction(3, 0, 0, clips=((1, 200), (2, 100))))
    assert tokens <= original.items[0].tokens + 300
    first, second, third = map(json.loads, message_slices(view))
    assert first == TASK
    made = second["tool_calls"][0]
    assert (made["id"], made["type"], made["function"]["name"]) == ("a", "function", "write")
    kept = json.loads(made["function"]["arguments"])
    assert (kept["path"], kept["lines"]) == ("src/a.py", [1, 2])
    assert 0 < len(kept["content"]) < 2000
    assert third["tool_call_id"] == "a"
    assert third["content"].startswith("line\n")
    assert message_problems(body, view) == []


def step(name: str, arguments: dict[str, Any], result: Any, at: int) -> list[Message]:
    """A call of one tool, and what it gave."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"c{at}", "type": "function", "function": function}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": f"c{at}", "content": result}]


def lines_of(messages: list[Message], compaction: Compaction) -> list[Any]:
    """The texts of the tool results of *messages* after *compaction*."""
    body = chat_body(messages)
    where = scan(body, "messages")
    items = [read_one(chat, body[start:end], count_tokens, tool_map_of_package()) for start, end in where.spans]
    _, view, _ = view_of(OriginalItems(body, where.spans, items, lay_out(items), chat), compaction)
    return [message["content"] for message in map(json.loads, message_slices(view)) if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ("1\tx\n2\ty\n3\tz", "a later reading of a.py includes this"),
        ("1\tx\n2\tnew\n3\tz", "a.py was read again later"),
    ],
)
def test_a_line_says_that_a_later_reading_includes_a_result_only_if_it_does(later: str, words: str) -> None:
    """Without a change in sight a file may have changed all the same: then it was read again, no more."""
    first = step("Read", {"file_path": "a.py", "offset": 1, "limit": 2}, "1\tx\n2\ty", 1)
    messages = [TASK, *first, *step("Read", {"file_path": "a.py"}, later, 2)]
    said = lines_of(messages, Compaction(5, 0, 0, placeholders=(Placeholder(2, "included", 4),)))
    assert said == [f"[Left out: {words}.]", later]


@pytest.mark.parametrize(
    ("name", "arguments", "about"),
    [
        ("codebase_search", {"query": "parser", "path": "src/core"}, "src/core"),
        ("codebase_search", {"query": "parser limits"}, "parser limits"),
        ("run_commands", {"commands": ["cd src", "make all"]}, "cd src; make all"),
        ("WebFetch", {"url": "https://example.org/a", "prompt": "x"}, "https://example.org/a"),
    ],
)
def test_a_line_says_what_the_call_was_about(name: str, arguments: dict[str, Any], about: str) -> None:
    """A search's folder or query, a list of commands and an address stay known when a result is left out."""
    messages = [TASK, *step(name, arguments, "line " * 50, 1)]
    (said,) = lines_of(messages, Compaction(3, 0, 0, placeholders=(Placeholder(2, "old"),)))
    assert about in said


def test_a_cut_text_keeps_the_image_beside_it() -> None:
    """If a result is truncated its image stays, and counts beside what the text may take."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo", "detail": "low"}}
    result = [{"type": "text", "text": "line\n" * 3000}, image]
    messages = [TASK, *step("Bash", {"command": "make"}, result, 1)]
    (said,) = lines_of(messages, Compaction(3, 0, 0, truncations=((2, 500),)))
    assert said[1] == image
    assert 200 < count_tokens(said[0]["text"]) < 500


def test_a_cut_result_names_what_its_middle_held() -> None:
    """Names and errors of the middle stand behind the marker, those of what is shown do not; the cap holds."""
    rows = [f"the value of row {at} is as before and nothing else" for at in range(600)]
    rows[0], rows[300] = "read by load_first_page", "Error: settle_batch_rules in src/billing/ledger.py refused DE4711"
    messages = [TASK, *step("Bash", {"command": "make"}, "\n".join(rows), 1)]
    (said,) = lines_of(messages, Compaction(3, 0, 0, truncations=((2, 800),)))
    head, _, rest = said.partition(MIDDLE)
    named, _, end = rest.removeprefix("\n").partition("\nthe value of row")
    assert "load_first_page" in head
    assert "load_first_page" not in named
    assert "settle_batch_rules" in named
    assert "src/billing/ledger.py" in named
    assert "row 300" not in said
    assert end.endswith("599 is as before and nothing else")
    assert 700 < count_tokens(said) <= 800


@pytest.mark.parametrize("text", ["word " * 4_000, "\n" * 4_000 + "a\n" * 4_000])
def test_a_middle_without_names_is_cut_as_before(text: str) -> None:
    """What names leave is for head and end."""
    messages = [TASK, *step("Bash", {"command": "make"}, text, 1)]
    (said,) = lines_of(messages, Compaction(3, 0, 0, truncations=((2, 800),)))
    assert BEGINNINGS[1] not in said


MANY = range(50)


@pytest.mark.parametrize("reason", ["repeated", "included", "old"])
def test_an_item_of_many_results_is_read_once_for_all_their_lines(reason: PlaceholderReason) -> None:
    """Thousands of results in one message cost as much as thousands of messages, not the square of it."""
    read: list[bytes] = []

    def read_item_texts(raws: Iterable[bytes]) -> list[ItemText]:
        some = list(raws)
        read.extend(some)
        return messages.read_item_texts(some)

    def round_of(name: str) -> list[dict[str, object]]:
        calls = [
            {"type": "tool_use", "id": f"{name}{at}", "name": "Read", "input": {"path": f"{at}.py"}} for at in MANY
        ]
        results = [{"type": "tool_result", "tool_use_id": f"{name}{at}", "content": f"row {at}"} for at in MANY]
        return [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]

    body = json.dumps({"messages": [TASK, *round_of("a"), *round_of("b")]}).encode()
    spans, tools = scan(body, "messages").spans, tool_map_of_package()
    items = [read_one(messages, body[start:end], count_tokens, tools) for start, end in spans]
    watched: Any = SimpleNamespace(**{**vars(messages), "read_item_texts": read_item_texts})
    original = OriginalItems(body, spans, items, lay_out(items), watched)
    compaction = Compaction(5, 0, 0, placeholders=(Placeholder(2, reason, 4),))
    _, edits = write_texts(original, compaction, count_tokens, tools)
    assert edits[2].count(b"[") == len(MANY) + 1
    assert len(read) <= 3
