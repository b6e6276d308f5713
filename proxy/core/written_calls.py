"""Tool calls and their results that clients write as text: finds them, and turns messages into tool items.

Some models cannot use the API's tool calls. A user's message is read as a result only if it begins like one and the
model's message before it contains a call. Further parts of that message are the user's own words, except parts that the
client is known to add; these may also come before the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from proxy.core.apis.base import ApiFormat
from proxy.core.apis.json_edit import to_json, with_content
from proxy.core.apis.json_scan import elements
from proxy.core.apis.json_steps import decode, parse
from proxy.core.conversation import UNREAD, Call, Item, ItemText, WrittenCalls, WrittenResult
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_calls import name_digest, written_id

MOST_CALLS: Final = 16
"""Calls that are read from one text, for each pattern."""

_CALLS_WITHIN: Final = 65_536
"""Characters at the end of a model's text that are searched for calls: models explain first and then call."""

_BEGINNING: Final = 1_024
"""Characters at the beginning of a text within which the heading of a result must be."""

_AFTER: Final = 4_096
"""Characters behind the name of a call that are searched for its arguments."""

_ARGUMENT: Final = lazy_pattern(r'<(?:parameter(?:=| name="))?(?P<key>\w{1,64})"?>\s{0,8}(?P<value>[^<]{0,1000})</')
_DECODER: Final = json.JSONDecoder()
_CLOSING: Final = lazy_pattern(r"</(\w+)>\s*\Z")

_MOST_ADDED: Final = 65_536
"""Characters of a block that a client adds before a result: one of Cline's lists up to 200 files."""


class TextToolFormat(msgspec.Struct, frozen=True):
    """The ways in which clients write calls and results as text: patterns, and beginnings of parts that clients add.

    A pattern may have the groups ``name`` and ``arguments``: the tool's name, and the beginning of JSON that holds its
    arguments or, in the members ``name`` and ``arguments``, both. ``any_beginning`` matches whatever one of
    ``result_patterns`` does or one of ``added_prefixes`` begins, if it is not None.
    """

    call_patterns: tuple[re.Pattern[str], ...] = ()
    result_patterns: tuple[re.Pattern[str], ...] = ()
    added_prefixes: tuple[str, ...] = ()
    any_beginning: re.Pattern[str] | None = None

    def find_calls(self, text: str) -> list[tuple[str, str]]:
        """Return name and arguments (JSON) of each call in a model's *text*, by pattern and not in the text's order."""
        end = text[-_CALLS_WITHIN:]
        # ``search`` takes half the time of an iterator without a match, and most patterns have none.
        matching = [pattern for pattern in self.call_patterns if pattern.search(end)]
        return [_call(match, end) for pattern in matching for match in islice(pattern.finditer(end), MOST_CALLS)]

    def find_result(self, content: Any) -> WrittenResult | None:
        """Return the result with which a message's *content* begins; None if it begins otherwise."""
        texts = [content]
        if isinstance(content, list):
            texts = [_text(part) for part in content]
        if not texts or self._begins_otherwise(texts[0], 0):
            return None
        return self._result_in(texts)

    def _result_in(self, texts: Sequence[Any]) -> WrittenResult | None:
        """Return the result with which the first of *texts* begins that the client has not added; None if none does."""
        first = next((at for at, text in enumerate(texts) if not self._is_added(text)), None)
        if first is None or not isinstance(texts[first], str):
            return None
        match = self._match_result(texts[first])
        if match is None:
            return None
        head = match.end()
        parts = self._result_parts(texts, first, head)
        user_parts = tuple(at for at in range(parts, len(texts)) if self._is_user_text(texts[at]))
        return WrittenResult(name_digest(match.groupdict().get("name") or ""), head, parts, user_parts, first)

    def _match_result(self, text: str) -> re.Match[str] | None:
        added = self._added_end(text)
        if self._begins_otherwise(text, added):
            return None
        start = _text_start(text, added)
        for pattern in self.result_patterns:
            if match := pattern.match(text, start, start + _BEGINNING):
                return match
        return None

    def _begins_otherwise(self, text: Any, at: int) -> bool:
        """True if what is at *at* in *text* surely is neither a result nor added: nearly all texts, at one call."""
        if not isinstance(text, str):
            return True
        if self.any_beginning is None:
            return False
        start = _text_start(text, at)
        return self.any_beginning.match(text, start, start + _BEGINNING) is None

    def _added_end(self, text: str) -> int:
        """Return the end of the block that the client added at the beginning of *text*; 0 if there is none."""
        start = _text_start(text, 0)
        if not text.startswith(self.added_prefixes, start):
            return 0
        prefix = next(prefix for prefix in self.added_prefixes if text.startswith(prefix, start))
        closing = prefix.replace("<", "</", 1)
        end = text.find(closing, start, start + _MOST_ADDED)
        if end < 0:
            return 0
        return end + len(closing)

    def _is_added(self, text: str | None) -> bool:
        """True if the client added all of *text*."""
        if not isinstance(text, str):
            return False
        end = self._added_end(text)
        return end > 0 and not text[end:].strip()

    def _result_parts(self, texts: Sequence[str | None], first: int, head: int) -> int:
        """Return the index behind the results: the one with the heading, its text if separate, further results."""
        is_only_head = not (texts[first] or "")[head:].strip()
        parts = first + 1
        if is_only_head and len(texts) > parts and texts[parts] is not None:
            parts += 1
        while parts < len(texts) and self._is_result(texts[parts]):
            parts += 1
        return parts

    def _is_result(self, text: str | None) -> bool:
        return text is not None and self._match_result(text) is not None

    def _is_user_text(self, text: str | None) -> bool:
        return text is not None and bool(text.strip()) and not text.lstrip().startswith(self.added_prefixes)


NO_TEXT_FORMAT = TextToolFormat()


def _text_start(text: str, start: int) -> int:
    """Return the index in *text* behind the white space at *start*."""
    if not text[start : start + 1].isspace():
        return start
    beginning = text[start : start + _BEGINNING]
    return start + len(beginning) - len(beginning.lstrip())


def _call(match: re.Match[str], text: str) -> tuple[str, str]:
    """Return name and arguments (JSON) of the call that *match* found in *text*; no arguments if they are no JSON."""
    groups = match.groupdict()
    name = groups.get("name") or ""
    if groups.get("arguments") is None:
        return name, to_json(_tagged_arguments(match, text, name))
    try:
        value, _ = _DECODER.raw_decode(text, match.start("arguments"))
    except (ValueError, RecursionError):
        return name, ""
    if not isinstance(value, dict):
        return name, ""
    if isinstance(value.get("name"), str):
        name, value = value["name"], value.get("arguments", value.get("parameters", {}))
    if isinstance(value, str):
        return name, value
    return name, to_json(value)


def _tagged_arguments(match: re.Match[str], text: str, name: str) -> dict[str, str]:
    """Return the arguments between tags up to the closing tag of *name*; none for a call without a name."""
    if not name:
        return {}
    inside = text[match.end() - 1 : match.end() + _AFTER].partition(f"</{name}>")[0]
    return {argument["key"]: argument["value"].strip() for argument in _ARGUMENT.finditer(inside)}


def find_written_calls(text: str, text_format: TextToolFormat, call: Callable[[str, str], Call]) -> WrittenCalls:
    """Return the calls in a model's *text*; *call* returns the facts of one."""
    calls = [(name, call(name, arguments)) for name, arguments in text_format.find_calls(text)]
    # The result of a protected tool, such as a question to the user, is the user's answer: it stays a user's message.
    tools = tuple(dict.fromkeys([name_digest(name) for name, facts in calls if facts.kind != "protected"]))
    if len(calls) == 1:
        return WrittenCalls(tools, calls[0][1])
    return WrittenCalls(tools, Call("unknown"))


def with_written_result(item: Item, raw: bytes, text_format: TextToolFormat, count: Callable[[str], int]) -> Item:
    """Return the user's *item* of the bytes *raw* with the form of the result that it begins with, if any."""
    content = decode(raw).get("content")
    written = text_format.find_result(content)
    if written is None:
        return item
    user_tokens = 0
    if user_text := _user_text(content, written):
        user_tokens = count(user_text)
    return replace(item, user_tokens=user_tokens, facts=UNREAD, written_result=written)


def join_written_results(
    items: Sequence[Item], start: int, calls_in: Callable[[int], WrittenCalls]
) -> tuple[Item, ...]:
    """Return *items*, with those from *start* on that answer a call written as text turned into tool items.

    *calls_in* returns the calls in the text of an item by its index. It is called only if a result follows. Each item
    depends only on the items before it, so it is the same in every later request.
    """
    joined = list(items)
    caller = _last_caller(items, start)
    for index in range(start, len(joined)):
        item = joined[index]
        if item.role == "assistant":
            caller = index
        elif item.role == "user":
            if _is_answer(item, joined, caller, calls_in):
                joined[index] = replace(item, role="tool", answers=(written_id(caller),))
            else:
                joined[index] = replace(item, facts=None)  # it looks like a result at most
                caller = -1
    return tuple(joined)


def _is_answer(item: Item, items: list[Item], caller: int, calls_in: Callable[[int], WrittenCalls]) -> bool:
    """Return True if the user's *item* is the result of a call in the text of ``items[caller]``, which is read."""
    written = item.written_result
    if written is None or caller < 0 or items[caller].calls:
        return False
    if items[caller].written_calls is None:
        items[caller] = replace(items[caller], written_calls=calls_in(caller))
    return _may_answer(written, items[caller].written_calls)


def _last_caller(items: Sequence[Item], start: int) -> int:
    """Return the index of the model's last message before *start*; -1 if a user's message follows it."""
    for index in range(start - 1, -1, -1):
        if items[index].role == "assistant":
            return index
        if items[index].role == "user":
            break
    return -1


def _may_answer(written: WrittenResult, calls: WrittenCalls | None) -> bool:
    """Return True if *written* may answer one of *calls*; 0 is a tool without a name."""
    if calls is None or not calls.tools:
        return False
    return not written.tool or written.tool in calls.tools or 0 in calls.tools


def texts_of(api_format: ApiFormat, raw: Mapping[int, bytes], items: Sequence[Item]) -> dict[int, ItemText]:
    """Return the texts of those of *items* whose bytes are *raw*, by index. Equal ones are read once.

    A tool result that the client wrote as plain text counts as a result.
    """
    distinct = list(dict.fromkeys(raw.values()))
    read = dict(zip(distinct, api_format.read_item_texts(distinct), strict=True))
    texts = {index: read[item] for index, item in raw.items()}
    for index, item in raw.items():
        written = items[index].written_result
        if written is not None and items[index].role == "tool":
            texts[index] = as_result(item, texts[index], written)
    return texts


def as_result(raw: bytes, entry: ItemText, written: WrittenResult) -> ItemText:
    """Return *entry*, the words of a message, as those of the tool result that it is."""
    content = decode(raw).get("content")
    result = "\n".join(_texts(content)[written.first : written.parts])[written.head :]
    user_text = _user_text(content, written)
    return replace(entry, role="tool", user_text=user_text, results=((result.strip("\n"), False),))


def _user_text(content: Any, written: WrittenResult) -> str:
    """Return the user's own words behind the result with which *content* begins."""
    if not written.user_parts:
        return ""
    texts = _texts(content)
    return "\n".join([texts[at] for at in written.user_parts])


def _texts(content: Any) -> list[str]:
    """Return the text of each part of *content*, empty for one without a text; a text is its own only part."""
    if isinstance(content, list):
        return [_text(part) or "" for part in content]
    return [str(content)]


def replace_written_result(
    raw: bytes, text: str, written: WrittenResult, is_media: Callable[[Mapping[str, Any]], bool] | None
) -> bytes:
    """Return the message with *text* in place of its result; its head, its end and all other parts stay.

    Parts of the result for which *is_media* is true stay as well.
    """

    def replaced(value: str) -> str:
        content = parse(value)
        if isinstance(content, str):
            return to_json(_framed(content, text, written))
        parts = [value[start:end] for start, end in elements(value, 0)[0]]
        at_result, behind = written.first, written.parts
        result = to_json({**content[at_result], "text": _framed(_text(content[at_result]) or "", text, written)})
        media: list[str] = []
        if is_media is not None:
            media = [parts[at] for at in range(at_result + 1, behind) if is_media(content[at])]
        return "[" + ",".join([*parts[:at_result], result, *media, *parts[behind:]]) + "]"

    return with_content(raw, replaced)


def _framed(whole: str, text: str, written: WrittenResult) -> str:
    """Return *text* between the head of the *whole* result and the closing tag that belongs to it."""
    head = whole[: written.head].rstrip()
    closing = _CLOSING.search(whole, max(written.head, len(whole) - _BEGINNING))
    end = ""
    if closing is not None and f"<{closing[1]}>" in head:
        end = closing.group().strip()
    return "\n".join(piece for piece in (head, text, end) if piece)


def _text(part: Any) -> str | None:
    """Return the text of a part; None if it has none."""
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return None
    text: str = part["text"]
    return text
