"""Items that clients carry for us: opened with any key, trusted only with the right code."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.block import FOOTER, HEADER
from proxy.features.client_compaction.compaction_item import MOST_BYTES, PREFIX, open_items, pack, unpack
from tests.support.api_formats import text_of

KEY, OTHER = b"k" * 32, b"o" * 32
TEXT = f"{HEADER}\n\nThe rows get lost at midnight.\n\n{FOOTER}"
ALONE = "The rows get lost at midnight."


def sealed(inner: bytes, code: bytes = b"c" * 16) -> str:
    return PREFIX + base64.urlsafe_b64encode(code + inner).decode()


def body(*items: object) -> bytes:
    return json.dumps({"model": "m", "input": items, "tools": []}, indent=1).encode()


def item(value: object, kind: str = "compaction") -> dict[str, object]:
    return {"type": kind, "id": "cmp_1", "encrypted_content": value}


@given(st.text(min_size=1).filter(str.strip).map(lambda text: text.encode("utf-8", "replace").decode()))
def test_what_was_packed_is_unpacked(text: str) -> None:
    """With the same key a text comes back as a block of ours, with another one as words of somebody."""
    assert unpack(pack(text, KEY), KEY) == (f"{HEADER}\n\n{text}\n\n{FOOTER}", True)
    assert unpack(pack(text, KEY), OTHER) == (text, False)


@given(st.integers(0), st.integers(1, 255))
def test_no_changed_byte_counts_as_ours(at: int, flip: int) -> None:
    """Whatever byte is changed: it is read as somebody's words, or not at all."""
    raw = bytearray(base64.urlsafe_b64decode(pack(TEXT, KEY)[len(PREFIX) :]))
    raw[at % len(raw)] ^= flip
    found = unpack(PREFIX + base64.urlsafe_b64encode(raw).decode(), KEY)
    assert found is None or found == (ALONE, False)


@pytest.mark.parametrize(
    "value",
    [
        "gAAAAA-of-somebody-else",
        PREFIX,
        PREFIX + "!!",
        PREFIX + "AAA",
        sealed(b"not compressed"),
        sealed(zlib.compress(b"\xff\xfe")),
        sealed(zlib.compress(b"   ")),
        sealed(zlib.compress(b"cut short")[:-3]),
        sealed(zlib.compress(b"x" * (MOST_BYTES + 1))),
    ],
)
def test_what_cannot_be_read_stays(value: str) -> None:
    """Items of other makers, broken ones and bombs are left for the upstream to judge, byte for byte."""
    assert unpack(value, KEY) is None
    sent = body(item(value), {"role": "user", "content": f"about {PREFIX}"})
    assert open_items(sent, KEY).body is sent or open_items(sent, KEY).body == sent


def test_an_item_becomes_what_it_says() -> None:
    """Every item of ours turns into a user message where it stood; all other bytes stay; forgeries are no summaries."""
    user = {"role": "user", "content": "Go on."}
    items = [user, item(pack(TEXT, KEY)), item("gAAA"), item(pack(TEXT, OTHER), "compaction_summary"), user]
    sent = body(*items)
    found = open_items(sent, KEY)
    view = json.loads(found.body)["input"]
    assert [view[0], view[2], view[4]] == [user, item("gAAA"), user]
    assert [text_of(view[1]), text_of(view[3])] == [TEXT, ALONE]
    assert {entry["role"] for entry in (view[1], view[3])} == {"user"}
    assert found.ours == (1,)
    assert found.body.startswith(sent[:60])
    assert found.body.endswith(sent[-60:])
    assert open_items(found.body, KEY).body == found.body


@pytest.mark.parametrize(
    "sent",
    [
        body({"role": "user", "content": pack(TEXT, KEY)}),
        body({"type": "reasoning", "encrypted_content": pack(TEXT, KEY)}),
        body(item({"a": PREFIX})),
        b'{"input":"' + pack(TEXT, KEY).encode() + b'"}',
        b'{"input":[' + PREFIX.encode(),
    ],
)
def test_only_compaction_items_are_opened(sent: bytes) -> None:
    """The same letters elsewhere are somebody's text."""
    assert open_items(sent, KEY).body == sent


def test_many_small_items_unfold_to_no_more_than_one_may() -> None:
    """Items that unfold a thousandfold are opened while their texts are within the bound together; the rest stay."""
    huge = item(pack("x" * (MOST_BYTES * 2 // 5), KEY))
    found = open_items(body(huge, huge, huge, item(pack("small", KEY))), KEY)
    assert found.ours == (0, 1, 3)
    assert len(found.body) < 2 * MOST_BYTES
    assert found.body.count(PREFIX.encode()) == 1
