"""Pages of the archive: bounded, complete when put together, and no reference but a good one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.errors import InvalidRequest
from proxy.features.history.pages import (
    ITEM,
    MAX_CHARACTERS,
    MAX_ITEMS,
    PREVIEW_CHARACTERS,
    Entry,
    Page,
    decode_list,
    encode_list,
    item_page,
    list_page,
    parse_reference,
    read_page,
    reference,
)

ROOT = b"r" * 16


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_a_reference_comes_apart_as_it_was_put_together(root: bytes, name: bytes) -> None:
    """Root and name come back; no other spelling of the reference does."""
    ref = reference(root, name)
    assert len(ref) == 43
    assert parse_reference(ref) == (root, name)
    for other in (ref[:-1], ref + "=", ref + "A", ref[:-1] + "é", " " + ref[1:], ref[:20] + "." + ref[21:]):
        assert parse_reference(other) is None or reference(*parse_reference(other)) == other != ref  # type: ignore[misc]


@given(st.text(max_size=300), st.integers(1, 50))
def test_the_pages_of_an_item_are_all_of_it(text: str, limit: int) -> None:
    """Put together in order the pages are the text, none longer than its limit."""
    value, pieces, at = ITEM + text.encode("utf-8", "replace"), [], 0
    while at is not None:
        shown: dict[str, Any] = item_page("ref", value, Page(at, limit))
        assert len(shown["content"]) <= limit
        pieces.append(shown["content"])
        at = shown["next_offset"]
    assert "".join(pieces) == value[1:].decode()


def test_pages_have_a_usual_size_and_a_most() -> None:
    """Three items, ten at most; beyond the end nothing. A page of text is bounded likewise."""
    entries = [Entry(i, "tool", b"%016d" % i, 5) for i in range(30)]

    def items(page: Page) -> list[Any]:
        start, stop = page.span(30, 3, MAX_ITEMS)
        return list_page("ref", ROOT, entries, [b"Ix"] * (stop - start), page)["items"]  # type: ignore[return-value]

    assert [each["index"] for each in items(Page())] == [0, 1, 2]
    assert len(items(Page(5, 500))) == MAX_ITEMS
    assert [each["index"] for each in items(Page(28, 5))] == [28, 29]
    assert items(Page(99)) == []
    shown: dict[str, Any] = item_page("ref", b"I" + b"x" * 300_000, Page(0, 10**9))
    assert len(shown["content"]) == MAX_CHARACTERS
    assert shown["next_offset"] == MAX_CHARACTERS


def test_a_list_shows_the_state_of_each_item() -> None:
    """An archived item is shown by its beginning, one that is missing or was too big by its state."""
    entries = [Entry(1, "user", b"a" * 16, 5000), Entry(2, "tool", b"b" * 16, 5), Entry(3, "tool", b"", 10**6)]
    shown: dict[str, Any] = list_page("ref", ROOT, entries, [b"I" + b"y" * 5000, None, None], Page())
    assert [each["state"] for each in shown["items"]] == ["kept", "missing", "too_big"]
    assert shown["items"][0]["content"] == "y" * PREVIEW_CHARACTERS
    assert (shown["items"][0]["more"], shown["items"][2]["ref"], shown["total"]) == (True, None, 3)
    assert shown["items"][0]["ref"] == reference(ROOT, b"a" * 16)


@pytest.mark.parametrize(("offset", "limit"), [("-1", None), ("x", None), (None, "0"), (None, "1.5"), ("9" * 12, None)])
def test_what_is_no_page_is_refused(offset: str | None, limit: str | None) -> None:
    """Offsets are whole numbers from nought, limits from one."""
    with pytest.raises(InvalidRequest):
        read_page(offset, limit)


def test_a_page_may_be_left_to_us() -> None:
    """Without parameters it is the first page of the usual size."""
    assert read_page(None, None) == Page(0, None)
    assert read_page("5", "2") == Page(5, 2)


@pytest.mark.parametrize("value", [b"", b"I{}", b"L\xc1", b"L" + b"\x92\x02\x90"])
def test_what_is_no_list_is_none(value: bytes) -> None:
    """Noise, items and other versions are not read as lists."""
    assert decode_list(value) is None
    assert decode_list(encode_list([Entry(1, "user", b"a" * 16, 5)])) == (Entry(1, "user", b"a" * 16, 5),)
