"""The table of the APIs: an element's bytes, what is read of it, an edit, and the bytes that come of it.

Each row is one case of one API. To add a case, or the cases of another API, add rows. ``test_formats.py`` in
``tests/core/apis`` reads every row both ways: the bytes give the items, and the edit gives the bytes, of which the same
items are read.

``row(api, element, …)``: the element is a value, or text or bytes where their spelling matters. Then any of

- what is read: ``role``, ``calls`` and ``answers`` (ids), ``media``, ``guess``, ``sealed``, ``user_tokens`` (a pair is
  a range), ``text``, ``user_text``, ``spoken_calls``, ``kinds`` (of media), ``results``, ``parts`` (media, as bytes),
  ``marker``; ``counts`` is a text that must be counted in full, ``refused=True`` an element that is none;
- ``edit`` (one of the functions below) and ``gives``: bytes or text for the exact spelling, a value for any spelling, a
  ``Tokens`` for a size, None if nothing is left, ``SAME`` for the very object.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from proxy.core.apis import chat, gemini, messages, portable, responses
from proxy.core.compaction.truncate import clip
from proxy.core.tokens.media import DEFAULT_PRICES
from tests.stub import gemini as gemini_stub
from tests.stub import messages as messages_stub
from tests.stub import responses as responses_stub
from tests.stub import tokens as chat_stub
from tests.support.engine_fixtures import count_tokens

Element = Any
Edit = Callable[[str, bytes], "bytes | None"]
SAME: Final = object()
TEXT: Final = "a long text indeed"
LONG: Final = "word " * 2_000
"""Some 2,000 tokens."""

UNKNOWN_IMAGE: Final = DEFAULT_PRICES.image.tokens(None, "high")
"""Tokens of an image whose size cannot be read: those of the largest one (2048 x 768: eight tiles)."""


@dataclass(frozen=True)
class Api:
    """One API: its module, the strict upstream's weight of an element, and how far above that ours may be.

    ``least`` is what every element weighs at least, in tokens.
    """

    module: ModuleType
    weigh: Callable[[Any], int]
    slack: Callable[[Any], int]
    least: int


def _calls_in(message: Element) -> int:
    return len(message.get("tool_calls") or ()) + ("function_call" in message)


def _blocks_in(message: Element) -> int:
    return len(message["content"]) if isinstance(message["content"], list) else 0


APIS = {
    "chat": Api(chat, chat_stub.message_tokens, lambda m: 12 + chat.PER_CALL * _calls_in(m), chat.PER_MESSAGE),
    "messages": Api(messages, messages_stub.weigh, lambda m: 8 + 16 * _blocks_in(m), 4),
    "responses": Api(responses, responses_stub.weigh, lambda m: 40, 4),
    "gemini": Api(gemini, gemini_stub.weigh, lambda c: 8 + 40 * len(c["parts"]), 4),
}


@dataclass(frozen=True)
class Tokens:
    """A size: more than *above* and at most *most* tokens, media aside."""

    above: int
    most: int


@dataclass(frozen=True)
class Row:
    """One case of one API."""

    api: str
    element: Element
    reads: dict[str, Any] = field(default_factory=dict)
    edit: Edit | None = None
    gives: Any = None

    @property
    def raw(self) -> bytes:
        return raw_of(self.element)

    def __str__(self) -> str:
        return f"{self.api} {self.raw[:60].decode(errors='replace')}"


def raw_of(element: Element) -> bytes:
    """The bytes of *element*."""
    if isinstance(element, bytes):
        return element
    return element.encode() if isinstance(element, str) else json.dumps(element).encode()


def row(api: str, element: Element, *, edit: Edit | None = None, gives: Any = None, **reads: Any) -> Row:
    """One case, see the module."""
    return Row(api, element, reads, edit, gives)


# The edits.


def added(text: str = "new", *, before: bool = False, media: Sequence[Element] = (), marker: bytes = b"") -> Edit:
    """*text* stands before or behind the element's own content, *media* behind it."""
    parts = [raw_of(part) for part in media]
    return lambda api, raw: APIS[api].module.with_text(raw, text, before=before, media=parts, marker=marker)


def results_replaced(*texts: str) -> Edit:
    """*texts* stand in place of what the element's tool results say."""
    return lambda api, raw: APIS[api].module.with_results(raw, texts)


def clipped(tokens: int) -> Edit:
    """The element is cut to about so many tokens, and its media."""

    def edit(api: str, raw: bytes) -> bytes:
        module = APIS[api].module
        media = module.read_item(raw, count_tokens).media
        return module.clipped(raw, shorten, count_tokens, tokens + media)

    return edit


def shorten(text: str, tokens: int) -> str:
    """*text* in at most so many tokens."""
    return clip(text, tokens, count_tokens)


def made_portable(api: str, raw: bytes) -> bytes | None:
    """The element without what only the model that wrote it can read."""
    return portable.PORTABLE[api](raw) or None


def as_list(api: str, raw: bytes) -> bytes | None:
    """The whole body with its items as a list."""
    return APIS[api].module.with_item_list(raw)


def user_message(api: str, raw: bytes) -> bytes:
    """A user element of our own, which says what *raw* is."""
    return APIS[api].module.user_message(json.loads(raw))


# What the rows are made of.

PICTURE = {"type": "image_url", "image_url": {"url": "https://x.y/z.png"}}
LOW_PICTURE = {"type": "image_url", "image_url": {"url": "https://x.y/z.png", "detail": "low"}}
INPUT_PICTURE = {"type": "input_image", "image_url": "https://x.y/z.png", "detail": "low"}
_PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 8 + struct.pack(">II", 750, 1000)).decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}}
REMOTE = {"type": "image", "source": {"type": "url", "url": "https://x.y/z.png"}}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "run", "input": {"cmd": "ls -la", "deep": [{"n": 1}]}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": TEXT}
THOUGHT = {"type": "thinking", "thinking": TEXT, "signature": "c2ln" * 4}
HOUR = {"type": "ephemeral", "ttl": "1h"}
MARK = {"type": "ephemeral"}


def call(name: str, arguments: Any, **members: object) -> Element:
    """A tool call of chat."""
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **members}


def model(**members: Any) -> Element:
    """A message of the model."""
    return {"role": "assistant", **members}


def text(words: str, kind: str = "text") -> Element:
    """A text part."""
    return {"type": kind, "text": words}


def blocks(*content: Element, role: str = "user") -> Element:
    """A message of blocks."""
    return {"role": role, "content": list(content)}


def parts(*content: Element, role: str = "user") -> Element:
    """A content of Gemini's."""
    return {"role": role, "parts": list(content)}


def function(name: str, *, id: str = "", **members: Element) -> Element:  # noqa: A002 - as the API calls it
    """A function call of Gemini's; with *members* it is signed, a result, or whatever they make of it."""
    made = {"name": name, "args": {"path": "a.py"}}
    return {"functionCall": {"id": id, **made} if id else made, **members}


def answer(name: str, response: Element, *, id: str = "", **members: Element) -> Element:  # noqa: A002
    """A function's result of Gemini's."""
    made = {"name": name, "response": response, **members}
    return {"functionResponse": {"id": id, **made} if id else made}


def content(spelled: str) -> str:
    """A user message of chat whose content is spelled so."""
    return f'{{ "content" : {spelled} , "role":"user"}}'


_P = json.dumps(PICTURE)
_BROKEN = [b"1", b"[]", b"null", b"{", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"signature": "kept"}'}}
_SIGNED = {**_CALL, "extra_content": {"google": {"thought_signature": "AbC="}}}
_TWO_RESULTS = [
    {"type": "tool_result", "tool_use_id": "a", "content": [text("hi")], "cache_control": {}},
    {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
    text("and so"),
]
_FILE = b'{"type":"file","file":{}}'
_SPACED_PICTURE = b'{ "type" : "image_url", "image_url":{"url":"\xc3\xa9"} }'
_SPACED_IMAGE = b'{ "type" : "image", "source":{"type":"url","url":"u"} }'
_SPACED_PARTS = (
    b'{"role":"user","content":[ ' + _SPACED_PICTURE + b' , {"type":"text","text":"x"},"loose",' + _FILE + b"]}"
)
_WORDS = b'{"type":"document","source":{"type":"text","data":"x"}}'
_SPACED_BLOCKS = b'{"content":[' + _WORDS + b" , " + _SPACED_IMAGE + b',"loose"]}'
_SERVER_TOOL_USE = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
_SHORT_THOUGHT = {"type": "thinking", "thinking": "t", "signature": "s"}
_PAPER = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * 4000}}
_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [text("hi", "input_text")]}
_FOUND = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"encrypted_content": "x" * 9000}]}

CHAT = [
    # Roles, calls and answers: the four roles there are; calls and answers meet by id, old ones by the name.
    row("chat", {"role": "system"}, role="system"),
    row("chat", {"role": "developer"}, role="system"),
    row("chat", {"role": "user"}, role="user"),
    row("chat", {"role": "narrator"}, role="user"),
    row("chat", {"role": None}, role="user"),
    row("chat", {}, role="user"),
    row("chat", model(tool_calls=None), role="assistant"),
    row("chat", model(tool_calls=[call("f", ""), call("g", "", id="c2")]), role="assistant", calls=("c1", "c2")),
    row("chat", model(tool_calls=[{"type": "custom", "id": "x", "custom": {}}]), role="assistant", calls=("x",)),
    row("chat", model(function_call={"name": "f"}), role="assistant", calls=("function:f",)),
    row("chat", {"role": "function", "name": "f", "content": "x"}, role="tool", answers=("function:f",)),
    row("chat", {"role": "tool", "tool_call_id": "c1"}, role="tool", answers=("c1",)),
    row("chat", {"role": "tool", "tool_call_id": 5}, role="tool", answers=("5",)),
    row("chat", {"role": "tool"}, role="tool"),
    # Whatever part of a message holds a text, the text is counted.
    row("chat", model(content=[text(TEXT)]), counts=TEXT),
    row("chat", model(content=[{"text": TEXT}]), counts=TEXT),
    row("chat", model(content=[TEXT]), counts=TEXT),
    row("chat", model(content={"what": TEXT}), counts=TEXT),
    row("chat", model(content=[{"type": "thinking", "thinking": TEXT}]), counts=TEXT),
    row("chat", model(content=[{"type": "refusal", "refusal": TEXT}]), counts=TEXT),
    row("chat", model(content=[{"type": "custom", "text": "x", "more": TEXT}]), counts=TEXT),
    row("chat", model(name=TEXT), counts=TEXT),
    row("chat", model(reasoning_content=TEXT), counts=TEXT),
    row("chat", model(reasoning_details=[{"text": TEXT}]), counts=TEXT),
    row("chat", model(refusal=TEXT), counts=TEXT),
    row("chat", model(tool_call_id=TEXT), counts=TEXT),
    row("chat", model(tool_calls=[call("f", TEXT)]), counts=TEXT),
    row("chat", model(tool_calls=[call(TEXT, "")]), counts=TEXT),
    row("chat", model(tool_calls=[call("f", "", id=TEXT)]), counts=TEXT),
    row("chat", model(tool_calls=[{"id": "x", "type": "custom", "custom": {"name": "f", "input": TEXT}}]),
        counts=TEXT),
    row("chat", model(tool_calls=[{"id": "x", "function": {"name": "f", "arguments": {"a": TEXT}}}]), counts=TEXT),
    row("chat", model(function_call={"name": "f", "arguments": TEXT}), counts=TEXT),
    row("chat", model(function_call={"name": TEXT, "arguments": ""}), counts=TEXT),
    # Media are part of the weight, named as such, and known as a guess where they are one.
    row("chat", blocks(PICTURE, LOW_PICTURE, text("see")), media=UNKNOWN_IMAGE + 85, guess=UNKNOWN_IMAGE,
        exactly="see"),
    row("chat", {"role": "user", "content": "see"}, media=0),
    row("chat", _SPACED_PARTS,
        parts=[_SPACED_PICTURE, _FILE]),
    row("chat", b'{"content":"x"}', parts=[]),
    row("chat", b"{}", parts=[]),
    row("chat", b'{"content":[],"content":[' + _P.encode() + b"]}", parts=[_P.encode()]),
    # Words, calls and kinds of media are told apart.
    row("chat", model(content=[text("one"), PICTURE, text("two")],
                      tool_calls=[call("f", '{"a":1}'), {"id": "x", "custom": {"name": "g", "input": "raw"}}],
                      function_call={"name": "h", "arguments": {"b": 2}}),
        role="assistant", calls=("c1", "x", "function:h"), text="one\ntwo", kinds=("image_url",),
        spoken_calls=(("f", '{"a":1}'), ("g", "raw"), ("h", '{"b":2}'))),
    row("chat", b'{"role":"tool","content":null}', text=""),
    # What is no message is the client's mistake.
    *[row("chat", raw, refused=True) for raw in (*_BROKEN, b'"x"', b"", b'{"content":"\xff"}')],
    # A string grows inside its quotes, a list by parts, nothing becomes the text; media stand behind our text.
    row("chat", content('"own"'), edit=added(before=True), gives=content('"new\\n\\nown"')),
    row("chat", content('"own"'), edit=added(), gives=content('"own\\n\\nnew"')),
    row("chat", content('"\\ud83d\\n"'), edit=added(before=True), gives=content('"new\\n\\n\\ud83d\\n"')),
    row("chat", content('""'), edit=added(before=True), gives=content('"new\\n\\n"')),
    row("chat", content("null"), edit=added(before=True), gives=content('"new"')),
    row("chat", content("[]"), edit=added(), gives=content('"new"')),
    row("chat", content("[ ]"), edit=added(before=True), gives=content('"new"')),
    row("chat", content('[ {"a": 1} ]'), edit=added(before=True),
        gives=content('[{"type":"text","text":"new"},{"a": 1}]')),
    row("chat", content('[ {"a": 1} ]'), edit=added(media=[PICTURE]),
        gives=content(f'[{{"a": 1}},{{"type":"text","text":"new"}},{_P}]')),
    row("chat", content('"own"'), edit=added(before=True, media=[PICTURE]),
        gives=content(f'[{{"type":"text","text":"new"}},{_P},{{"type":"text","text":"own"}}]')),
    row("chat", content('""'), edit=added(before=True, media=[PICTURE]),
        gives=content(f'[{{"type":"text","text":"new"}},{_P}]')),
    row("chat", content("null"), edit=added(media=[PICTURE]), gives=content(f'[{{"type":"text","text":"new"}},{_P}]')),
    # A message without content gets one, and loses nothing.
    *[row("chat", raw, edit=added(before=True), gives={**json.loads(raw), "content": "new"})
      for raw in ("{}", " { } ", '{"role":"user"}', '{"role":"user" }', '{"x":{"content":"a"}}')],
    *[row("chat", raw, edit=added(before=True, media=[PICTURE]),
          gives={**json.loads(raw), "content": [text("new"), PICTURE]})
      for raw in ("{}", " { } ", '{"role":"user"}', '{"role":"user" }', '{"x":{"content":"a"}}')],
    # Where a message has two contents, the last one is what parsers see.
    row("chat", '{"content":"a","role":"user","cont\\u0065nt":"b"}', edit=added(),
        gives='{"content":"a","role":"user","cont\\u0065nt":"b\\n\\nnew"}'),
    # Broken characters, quotes and control characters arrive as they are.
    *[row("chat", {"role": "user", "content": own}, edit=added(words, before=True),
          gives={"role": "user", "content": given})
      for words in ("\ud83d", '"\\', "é日本👩🏽‍💻", "\x00\u2028")
      for own, given in (("own", f"{words}\n\nown"), ([], words), ([text("own")], [text(words), text("own")]))],
    *[row("chat", words, edit=user_message, gives={"role": "user", "content": json.loads(words)})
      for words in ('"\\ud83d"', '"words"')],
    # A tool's content becomes the given text, parts stay parts, everything else keeps its bytes.
    *[row("chat", {"role": "tool", "tool_call_id": "a", "content": was, "x": [1.0]}, edit=results_replaced("X"),
          gives={"role": "tool", "tool_call_id": "a", "content": given, "x": [1.0]})
      for was, given in (("said", "X"), ([text("said")], [text("X")]), (None, "X"))],
    # Every place a client can put a long text is clipped to what was asked for.
    *[row("chat", element, edit=clipped(300), gives=Tokens(150, 300)) for element in (
        {"role": "user", "content": LONG},
        blocks(text(LONG), PICTURE, text("short")),
        {"role": "tool", "tool_call_id": "c1", "content": LONG},
        model(tool_calls=[call("f", json.dumps({"a": {"b": [LONG, 1]}, "n": None}))]),
        model(tool_calls=[call("f", LONG)]),
        model(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "f", "input": LONG}}]),
        model(tool_calls=[{"id": "c", "custom": {"name": "f", "input": json.dumps({"a": LONG})}}]),
        model(content=None, function_call={"name": "f", "arguments": json.dumps({"a": LONG})}),
        {"role": "user", "content": "\ud83d " * 3_000},
        model(tool_calls=[call("f", json.dumps({"a": LONG, "b": "\ud83d"}))]),
    )],
    # Signed and encrypted parts go, plain text and tool calls stay, and no message is left without content.
    row("chat", model(content="x", reasoning_content="plain", reasoning_details=[{"data": "e"}]), edit=made_portable,
        gives=model(content="x", reasoning_content="plain")),
    row("chat", model(content=None, tool_calls=[_SIGNED]), edit=made_portable,
        gives=model(content=None, tool_calls=[{**_CALL, "extra_content": {"google": {}}}])),
    row("chat", model(content=[{"type": "thinking", "thinking": "t", "signature": "s"}]), edit=made_portable,
        gives=model(content="")),
    row("chat", model(content=[{"type": "redacted_thinking"}, text("thinking")]), edit=made_portable,
        gives=model(content=[text("thinking")])),
    row("chat", model(content=None, thinking_blocks=[{"type": "thinking"}]), edit=made_portable,
        gives=model(content="")),
    # Words in a text are not reasoning, and users and tools have none.
    *[row("chat", raw, edit=made_portable, gives=SAME) for raw in (
        b'{ "role":"user", "signature":"mine", "content":"thinking" }',
        b'{ "role":"assistant", "content":"about a signature that is encrypted" }',
        b'{"role":"tool","content":[{"type":"text","text":"thinking"}],"tool_call_id":"a"}',
        b'["thinking"]',
        b'"thinking"',
    )],
]  # fmt: skip

MESSAGES = [
    # An item with results is a tool item, whoever is said to speak; calls and answers meet by id.
    row("messages", {"role": "user", "content": "hi"}, role="user"),
    row("messages", blocks(text("hi"), IMAGE), role="user"),
    row("messages", blocks(RESULT), role="tool", answers=("t1",)),
    row("messages", blocks(RESULT, {**RESULT, "tool_use_id": "t2"}, text("stop")), role="tool", answers=("t1", "t2")),
    row("messages", blocks(THOUGHT, text("I look."), TOOL_USE, role="assistant"), role="assistant", calls=("t1",)),
    row("messages", blocks(_SERVER_TOOL_USE, role="assistant"),
        role="assistant"),
    row("messages", {"role": "system", "content": "x"}, role="system"),
    row("messages", {"role": "narrator"}, role="user"),
    row("messages", {}, role="user"),
    # Whatever block holds a text, the text is counted.
    row("messages", blocks(text(TEXT)), counts=TEXT),
    row("messages", blocks(RESULT), counts=TEXT),
    row("messages", blocks({**RESULT, "content": [text(TEXT), IMAGE]}), counts=TEXT),
    row("messages", blocks({**TOOL_USE, "input": {"a": [TEXT]}}), counts=TEXT),
    row("messages", blocks(THOUGHT), counts=TEXT),
    row("messages", blocks({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": TEXT}}),
        counts=TEXT),
    row("messages", blocks({"type": "document", "source": {"type": "content", "content": [text(TEXT)]}, "title": "T"}),
        counts=TEXT),
    row("messages", blocks({"type": "search_result", "source": "u", "title": "t", "content": [text(TEXT)]}),
        counts=TEXT),
    row("messages", blocks({"type": "mcp_tool_result", "tool_use_id": "m", "content": [text(TEXT)]}), counts=TEXT),
    row("messages", blocks({"type": "compaction", "content": TEXT}), counts=TEXT),
    row("messages", blocks({"type": "nobody_knows", "words": TEXT}), counts=TEXT),
    # Images weigh by their size, what cannot be read is a guess, what is signed or encrypted may not be clipped.
    row("messages", blocks(IMAGE), media=765, guess=0),
    row("messages", blocks(REMOTE), media=(766, 9_999), guess=(766, 9_999), all_media_guessed=True),
    row("messages", blocks(_PAPER), media=(101, 9_999), guess=(101, 9_999), all_media_guessed=True),
    row("messages", blocks({**THOUGHT, "thinking": "", "signature": "x" * 1600}, role="assistant"),
        guess=300, media=0, sealed=(301, 9_999)),
    row("messages", blocks(THOUGHT), guess=0),
    row("messages", blocks({"type": "redacted_thinking", "data": "x" * 160}), guess=30),
    row("messages", _SPACED_BLOCKS,
        parts=[_SPACED_IMAGE]),
    row("messages", b'{"content":"x"}', parts=[]),
    # The user's own words in an item of results are told apart from the results.
    row("messages", blocks(RESULT, text("Stop that."), IMAGE), role="tool", answers=("t1",),
        user_tokens=count_tokens("Stop that."),
        user_text="Stop that.", kinds=("image",), text=f"{TEXT}\nStop that."),
    row("messages", blocks(text("Stop that.")), user_tokens=0),
    # Words and calls are told apart, and thoughts are nobody's words.
    row("messages", blocks(THOUGHT, text("I look."), TOOL_USE, role="assistant"), role="assistant", calls=("t1",),
        text="I look.", spoken_calls=(("run", '{"cmd":"ls -la","deep":[{"n":1}]}'),)),
    # What is no message is the client's mistake, and no list of messages either.
    *[row("messages", raw, refused=True) for raw in _BROKEN],
    *[row("messages", raw, edit=as_list, gives=None) for raw in _BROKEN],
    # Where there is no user item to carry a text, one is made; one without content gets some.
    row("messages", '"\\ud83d x"', edit=user_message, gives={"role": "user", "content": "\ud83d x"}),
    row("messages", '{"role":"user"}', edit=added(before=True), gives=blocks(text("new"))),
    # The last mark of a message counts, also one inside a result.
    row("messages", blocks(text("a"), {**RESULT, "content": [{**text("x"), "cache_control": HOUR}]}), marker=HOUR),
    row("messages",
        blocks({**RESULT, "content": [{**text("x"), "cache_control": HOUR}]}, {**text("a"), "cache_control": MARK}),
        marker=MARK),
    row("messages", blocks(text("a")), marker=None),
    # Each result's content is replaced in the order of their ids; ids, marks, errors and the user's words stay.
    row("messages", blocks(*_TWO_RESULTS), results=(("hi", False), ("no", True)), edit=results_replaced("X", "Y"),
        gives=blocks({**_TWO_RESULTS[0], "content": "X"}, {**_TWO_RESULTS[1], "content": "Y"}, _TWO_RESULTS[2])),
    # Every place a client can put a long text is clipped to what was asked for.
    *[row("messages", element, edit=clipped(300), gives=Tokens(150, 300)) for element in (
        {"role": "user", "content": LONG},
        blocks(text(LONG), IMAGE, text("short")),
        blocks({**RESULT, "content": LONG}),
        blocks({**RESULT, "content": [text(LONG), IMAGE]}),
        blocks(THOUGHT, {**TOOL_USE, "input": {"a": {"b": [LONG, 1.5]}}}, role="assistant"),
        blocks({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": LONG}}),
        blocks({"type": "search_result", "source": "u", "title": "t", "content": [text(LONG)]}),
    )],
    # A thought and what a server's own tool found stay byte for byte, however long they are.
    row("messages", json.dumps(blocks({**THOUGHT, "thinking": LONG}, _FOUND, role="assistant")), edit=clipped(50),
        gives=json.dumps(blocks({**THOUGHT, "thinking": LONG}, _FOUND, role="assistant"))),
    # Blocks of thought go, signed or redacted; a message of nothing else goes whole.
    row("messages", blocks(_SHORT_THOUGHT, {"type": "tool_use", "id": "a"}, role="assistant"),
        edit=made_portable, gives=blocks({"type": "tool_use", "id": "a"}, role="assistant")),
    row("messages", blocks({"type": "redacted_thinking", "data": "e"}, role="assistant"), edit=made_portable,
        gives=None),
    # Everything else is the client's own bytes.
    *[row("messages", f'{{ "role":"user","content":{spelled} }}'.encode(), edit=made_portable, gives=SAME)
      for spelled in ('"thinking"', '[{"type":"text","text":"signature"}]', "null")],
    row("messages", b'"thinking"', edit=made_portable, gives=SAME),
]  # fmt: skip

RESPONSES = [
    # What the model made, what answers it and what is always kept are told apart; calls and answers meet by id.
    row("responses", {"role": "user", "content": "hi"}, role="user"),
    row("responses", {"type": "message", "role": "developer", "content": "hi"}, role="system"),
    row("responses", {"type": "message", "role": "assistant", "content": [], "id": "msg_1"}, role="assistant"),
    row("responses", {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
        role="assistant", calls=("c1",)),
    row("responses", {"type": "function_call_output", "call_id": "c1", "output": "x"}, role="tool", answers=("c1",)),
    row("responses", {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "x"},
        role="assistant", calls=("c1",)),
    row("responses", {"type": "custom_tool_call_output", "call_id": "c1", "output": "x"}, role="tool", answers=("c1",)),
    row("responses", {"type": "local_shell_call", "id": "l1", "call_id": "c1", "action": {}},
        role="assistant", calls=("c1", "l1")),
    row("responses", {"type": "local_shell_call_output", "id": "l1", "output": "x"}, role="tool", answers=("l1",)),
    row("responses", {"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot"}},
        role="tool", answers=("c1",), results=()),
    row("responses", {"type": "mcp_approval_request", "id": "m1"}, role="assistant", calls=("m1",)),
    row("responses", {"type": "mcp_approval_response", "approval_request_id": "m1", "approve": True},
        role="tool", answers=("m1",)),
    row("responses", {"type": "reasoning", "id": "rs_1", "summary": []}, role="assistant"),
    row("responses", {"type": "web_search_call", "id": "ws_1"}, role="assistant"),
    row("responses", {"type": "item_reference", "id": "x"}, role="assistant"),
    row("responses", {"type": "compaction", "encrypted_content": "x"}, role="system"),
    row("responses", {"type": "compaction_trigger"}, role="tool"),
    row("responses", {"type": "nobody_knows"}, role="assistant"),
    row("responses", {}, role="user"),
    # Whatever holds a text, the text is counted.
    row("responses", {"role": "user", "content": TEXT}, counts=TEXT),
    row("responses", blocks(text(TEXT, "input_text")), counts=TEXT),
    row("responses", blocks({"type": "refusal", "refusal": TEXT}, role="assistant"), counts=TEXT),
    row("responses", {"type": "function_call", "name": "f", "arguments": TEXT}, counts=TEXT),
    row("responses", {"type": "function_call_output", "output": TEXT}, counts=TEXT),
    row("responses", {"type": "function_call_output", "output": [text(TEXT, "input_text"), INPUT_PICTURE]},
        counts=TEXT),
    row("responses", {"type": "custom_tool_call", "input": TEXT}, counts=TEXT),
    row("responses", {"type": "local_shell_call", "action": {"command": [TEXT]}}, counts=TEXT),
    row("responses", {"type": "mcp_call", "output": TEXT}, counts=TEXT),
    row("responses", {"type": "reasoning", "summary": [{"type": "summary_text", "text": TEXT}]}, counts=TEXT),
    row("responses", {"type": "nobody_knows", "words": {"deep": [TEXT]}}, counts=TEXT),
    # Pictures weigh by detail, references by a guess; what the provider encrypted is a guess that no clip touches.
    row("responses", blocks(INPUT_PICTURE), media=85),
    row("responses", {"type": "computer_call_output", "call_id": "c",
                      "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}},
        media=(86, 9_999)),
    row("responses", {"type": "image_generation_call", "id": "i", "result": "A" * 40_000}, tokens=(86, 1_999)),
    row("responses", {"type": "item_reference", "id": "rs_1"}, guess=responses.REFERENCE, media=responses.REFERENCE),
    row("responses", {"type": "reasoning", "summary": [], "encrypted_content": "x" * 1600},
        guess=300, media=0, all_sealed=True),
    row("responses", blocks(text("x", "input_text"), INPUT_PICTURE), parts=[json.dumps(INPUT_PICTURE).encode()]),
    # Words, calls and media are told apart; reasoning is nobody's words.
    row("responses", blocks(text("one", "input_text"), INPUT_PICTURE, text("two", "input_text")),
        role="user", text="one\ntwo", kinds=("input_image",)),
    row("responses", b'{"type":"function_call","name":"f","arguments":"{\\"a\\":1}"}',
        spoken_calls=(("f", '{"a":1}'),)),
    row("responses", b'{"type":"local_shell_call","action":{"command":["ls"]}}',
        spoken_calls=(("local_shell_call", '{"command":["ls"]}'),)),
    row("responses", b'{"type":"function_call_output","output":"found"}', text="found"),
    row("responses", b'{"type":"reasoning","summary":[{"type":"summary_text","text":"hm"}]}', text=""),
    # What is no element is the client's mistake.
    *[row("responses", raw, refused=True) for raw in (*_BROKEN, b'"x"')],
    # A text is one user message, no input is none; everything around them stays as it is spelled.
    row("responses", b'{"input": "hi \\"you\\"", "x": 1.0}', edit=as_list,
        gives=b'{"input": [{"type":"message","role":"user","content":"hi \\"you\\""}], "x": 1.0}'),
    row("responses", b'{"model":"m" }', edit=as_list, gives=b'{"model":"m" ,"input":[]}'),
    *[row("responses", body, edit=as_list, gives=None)
      for body in (b'{"input":{}}', b'{"input":"a","input":"b"}', b"{}", b"[")],
    # Where there is no user item to carry a text, one is made that a strict provider accepts.
    row("responses", '"words"', edit=user_message,
        gives={"type": "message", "role": "user", "content": [text("words", "input_text")]}),
    row("responses", {"type": "message", "role": "user", "content": [text("words", "input_text")]}, marker=None),
    row("responses", b'{"role":"user"}', edit=added(before=True), gives=blocks(text("new", "input_text"))),
    # A function's output, text or parts, becomes the given text; a screenshot is no such result (above).
    row("responses", _OUTPUT, results=(("hi", False),), edit=results_replaced("X"), gives={**_OUTPUT, "output": "X"}),
    # Every place a client can put a long text is clipped to what was asked for.
    *[row("responses", element, edit=clipped(300), gives=Tokens(150, 300)) for element in (
        {"role": "user", "content": LONG},
        blocks(text(LONG, "input_text"), INPUT_PICTURE, text("short", "input_text")),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": [LONG]})},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": LONG},
        {"type": "function_call_output", "call_id": "c", "output": LONG},
        {"type": "function_call_output", "call_id": "c", "output": [text(LONG, "input_text")]},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": LONG, "stderr": "", "outcome": {}}]},
    )],
    # Reasoning and references go, calls and answers keep their call_id and lose their stored name.
    row("responses", {"type": "reasoning", "id": "rs_1", "encrypted_content": "e"}, edit=made_portable, gives=None),
    row("responses", {"type": "item_reference", "id": "msg_1"}, edit=made_portable, gives=None),
    row("responses", {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f"}, edit=made_portable,
        gives={"type": "function_call", "call_id": "c", "name": "f"}),
    row("responses", {"type": "message", "role": "assistant", "id": "msg_1", "content": []}, edit=made_portable,
        gives={"type": "message", "role": "assistant", "content": []}),
    row("responses", {"type": "message", "role": "user", "content": "reasoning"}, edit=made_portable,
        gives={"type": "message", "role": "user", "content": "reasoning"}),
    row("responses", {"type": "function_call_output", "id": "fc_2", "call_id": "c"}, edit=made_portable,
        gives={"type": "function_call_output", "id": "fc_2", "call_id": "c"}),
    row("responses", b'"thinking"', edit=made_portable, gives=SAME),
]  # fmt: skip

GEMINI = [
    # A content with results is a tool item, whoever is said to speak; pairs are named by function and number.
    row("gemini", parts({"text": "hi"}), role="user", text="hi"),
    row("gemini", {"parts": [{"text": "hi"}]}, role="user"),
    row("gemini", parts({"text": "hi"}, function("f"), role="model"), role="assistant", calls=("f#0",), text="hi",
        spoken_calls=(("f", '{"path":"a.py"}'),)),
    row("gemini", parts(function("f"), function("g"), function("f"), role="model"),
        role="assistant", calls=("f#0", "g#0", "f#1")),
    row("gemini", parts(answer("f", {"output": TEXT})), role="tool", answers=("f#0",), results=((TEXT, False),)),
    row("gemini", parts(answer("f", {"a": 1}), role="function"), role="tool", answers=("f#0",),
        results=(('{"a":1}', False),)),
    row("gemini", parts(answer("f", {"error": "no"}), answer("f", {"result": "yes"})), role="tool",
        answers=("f#0", "f#1"), results=(("no", True), ("yes", False))),
    # An id counts if others are of the same function: clients make ids up for calls that had none.
    row("gemini", parts(function("f", id="x"), role="model"), role="assistant", calls=("f#0",)),
    row("gemini", parts(answer("f", {}, id="made-up")), role="tool", answers=("f#0",)),
    row("gemini", parts(function("f", id="x"), function("f", id="y"), role="model"),
        role="assistant", calls=("f#x", "f#y")),
    row("gemini", parts(answer("f", {}, id="y"), answer("f", {}, id="x")), role="tool", answers=("f#y", "f#x")),
    # Both spellings of a member are read.
    row("gemini", parts({"function_call": {"name": "f", "args": {}}}, role="model"), role="assistant", calls=("f#0",)),
    row("gemini", parts({"function_response": {"name": "f", "response": {"output": TEXT}}}), role="tool",
        answers=("f#0",), counts=TEXT),
    row("gemini", parts({"inline_data": {"mime_type": "image/png", "data": _PNG}}), media=765, guess=0),
    # Whatever holds a text, the text is counted.
    row("gemini", parts({"text": TEXT}), exactly=TEXT),
    row("gemini", parts({"functionCall": {"name": "f", "args": {"a": [TEXT]}}}, role="model"), counts=TEXT),
    row("gemini", parts({"codeExecutionResult": {"output": TEXT}}, role="model"), counts=TEXT, sealed=(5, 99)),
    row("gemini", parts({"nobodyKnows": {"words": TEXT}}), counts=TEXT),
    # Media weigh by what they are; what is only named, and video, is a guess.
    row("gemini", parts({"inlineData": {"mimeType": "image/png", "data": _PNG}}), media=765, guess=0, kinds=("image",),
        parts=[json.dumps({"inlineData": {"mimeType": "image/png", "data": _PNG}}).encode()]),
    row("gemini", parts({"fileData": {"mimeType": "application/pdf", "fileUri": "files/x"}}), all_media_guessed=True,
        media=(100, 9_999)),
    row("gemini", parts({"inlineData": {"mimeType": "video/mp4", "data": "A" * 4_000_000}}), all_media_guessed=True,
        media=(3_000, 4_500)),
    row("gemini", parts({"inlineData": {"mimeType": "audio/mp3", "data": "A" * 40_000}}), media=(10, 400)),
    row("gemini", parts(answer("f", {}, parts=[{"inlineData": {"mimeType": "image/png", "data": _PNG}}])),
        role="tool", answers=("f#0",), media=765, parts=[]),
    # The user's own words in a content of results are told apart from the results.
    row("gemini", parts(answer("f", {"output": TEXT}), {"text": "Stop that."}), role="tool", answers=("f#0",),
        user_tokens=count_tokens("Stop that."), user_text="Stop that.", text=f"{TEXT}\nStop that."),
    # Thoughts are nobody's words, and a signature is sealed with its part.
    row("gemini", parts({"text": "hm", "thought": True}, {"text": "I look."}, role="model"), role="assistant",
        text="I look.", sealed=(1, 9)),
    row("gemini", parts({"text": "", "thoughtSignature": "x" * 1600}, role="model"), guess=300, sealed=(300, 310)),
    # What is no content is the client's mistake, and only a request for a count holds another.
    *[row("gemini", raw, refused=True) for raw in _BROKEN],
    *[row("gemini", raw, edit=as_list, gives=None) for raw in (*_BROKEN, b'{"contents":{}}', b'{"x":[]}')],
    row("gemini", b'{"generateContentRequest": {"contents": [1], "model":"m"} }', edit=as_list,
        gives=b'{"contents": [1], "model":"m"}'),
    # A text of ours stands beside the content's own parts, or alone.
    row("gemini", '"words"', edit=user_message, gives=parts({"text": "words"})),
    row("gemini", '{"role":"user"}', edit=added(before=True), gives=parts({"text": "new"})),
    row("gemini", b'{"parts" : [ {"text" : "a"} ],"role":"user"}', edit=added(before=True),
        gives=b'{"parts" : [{"text":"new"},{"text" : "a"}],"role":"user"}'),
    row("gemini", b'{"parts" : [ {"text" : "a"} ],"role":"user"}', edit=added(media=[{"inlineData": {}}]),
        gives=b'{"parts" : [{"text" : "a"},{"text":"new"},{"inlineData": {}}],"role":"user"}'),
    row("gemini", parts({"text": "a"}), marker=None),
    # Each result's response is replaced in order; names, ids and the user's words stay.
    row("gemini", parts(answer("f", {"a": 1}, id="x"), answer("g", {"b": [2]}, parts=[{"inlineData": {}}]),
                        {"text": "so"}),
        edit=results_replaced("X", "Y"),
        gives=parts(answer("f", {"output": "X"}, id="x"), answer("g", {"output": "Y"}), {"text": "so"})),
    row("gemini", parts(answer("f", {"a": 1}), answer("g", {"b": 2})), edit=results_replaced('{"a":1}', "Y"),
        gives=parts(answer("f", {"a": 1}), answer("g", {"output": "Y"}))),
    # Every place a client can put a long text is clipped to what was asked for.
    *[row("gemini", element, edit=clipped(300), gives=Tokens(150, 300)) for element in (
        parts({"text": LONG}, {"inlineData": {"mimeType": "image/png", "data": _PNG}}, {"text": "short"}),
        parts({"functionCall": {"name": "f", "args": {"a": {"b": [LONG, 1.5]}}}}, role="model"),
        parts(answer("f", {"output": LONG, "code": 0})),
        parts(answer("f", {"output": [LONG, LONG]}), answer("g", {"short": 1})),
    )],
    # A signed part stays byte for byte, however long it is; so do thoughts and what a server's tool found.
    *[row("gemini", json.dumps(element), edit=clipped(50), gives=json.dumps(element))
      for element in (parts(part, role="model") for part in (
        {"functionCall": {"name": "f", "args": {"a": LONG}}, "thoughtSignature": "c2ln"},
        {"text": LONG, "thought_signature": "c2ln"},
        {"text": LONG, "thought": True},
        {"codeExecutionResult": {"output": LONG}},
    ))],
    # For another model a call's signature gives way to one that every model takes; without one it stays as it is.
    row("gemini", parts({"text": "a", "thoughtSignature": "x"}, function("f", thoughtSignature="y"), function("g"),
                        role="model"),
        edit=made_portable,
        gives=parts({"text": "a"}, function("f", thoughtSignature="skip_thought_signature_validator"), function("g"),
                    role="model")),
    *[row("gemini", raw, edit=made_portable, gives=SAME)
      for raw in (b'{ "parts":[{"text":"thoughtSignature"}] }', b'{"parts":"x"}', b'"Signature"')],
]  # fmt: skip

ROWS = [*CHAT, *MESSAGES, *RESPONSES, *GEMINI]
