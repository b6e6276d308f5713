"""Cuts things short that are too large: tool results, single texts, many items at once, definitions of tools.

A text that was cut always says that something is missing. The same input is cut in the same way every time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from proxy.core.apis.json_edit import minified, to_json
from proxy.core.apis.json_scan import elements
from proxy.core.apis.json_steps import parse
from proxy.core.conversation import Count

MIDDLE = "[... the middle of this output was left out to save room; run a narrower command to see it ...]"
REST = "[... the rest was left out to save room; ask for a later or narrower part to see it ...]"

HEAD_ONLY = frozenset({"file_read", "grep", "glob", "list", "web_fetch", "web_search", "search_semantic"})
"""Kinds of tools whose results keep only their head. All others keep their end too: it says how the call went."""

BYTES_PER_TOKEN = 4
"""Bytes of a text that is not known, or of a body, that count as one token."""

_TRIES = 12
"""Times that a result is cut shorter to come under a number of tokens."""

_NEARLY_EXACT = 16_384
"""Characters from which the longest part that fits is found by counting what is between two lengths."""

_SEAMS = 64
"""Tokens by which the sum of such counts may be wrong: a few for each seam."""

_EDGES = (b"\n", b" ")
"""Edges at which a text is cut if one is near: between lines, else between words."""

MARKER = "\n[... middle left out to save room; ask for a narrower part if needed ...]\n"

SHORT_MARKER = " [...] "
"""The marker for texts that keep so little that ``MARKER`` would be most of it."""

OMITTED = "[...]"
"""Stands for a text, or for a part of one, of which nothing stays."""

_WIDE = "\u2e80"
"""From this code point on, scripts are written without spaces: a text may end after any character."""

HEAD_SHARE = 0.6
"""Share of a clipped text that its beginning gets: questions and headings stand there, results at the end."""

PROSE = ("description", "title", "$comment")
EXAMPLES = ("examples", "example", "default")
"""Keywords of a JSON Schema that explain and validate nothing:
https://json-schema.org/understanding-json-schema/reference/metadata
"""

_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Keywords whose members are schemas under names of the author's own."""

_SCHEMAS = frozenset({"parameters", "input_schema", "parametersJsonSchema", "parameters_json_schema"})
"""Members of a definition that hold the schema of its arguments."""

_DECLARATIONS = frozenset({"functionDeclarations", "function_declarations"})
"""Members of one of Gemini's tools that hold definitions: https://ai.google.dev/api/caching#Tool"""

_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r'"\$ref": "#/(\$defs|definitions)/([^"/]+)')
"""A reference to one of the definitions of the same schema."""

_OTHER_REFERENCES = re.compile(r'"\$(?:id|anchor|dynamicRef|recursiveRef)": |"\$ref": "[^"]*[~%]')
"""What can refer to a definition in another way, or spell its name differently."""

LEVELS = ((400, 200, True), (160, 60, False), (80, 0, False), (0, 0, False))
"""For each level, the characters that a tool's own description and the nested ones keep, and if examples stay."""


# Tool results, to a number of lines, bytes and tokens.


class TruncateLimits(msgspec.Struct, frozen=True):
    """The most lines and bytes that a tool result keeps, and the share of the room it may take when room is short."""

    max_lines: int = 2_000
    max_bytes: int = 50_000
    share: float = 0.10

    def tokens_in(self, room: int) -> int:
        """Tokens that a result may keep if all messages together have *room* tokens."""
        return max(0, min(int(self.share * room), self.max_tokens))

    @property
    def max_tokens(self) -> int:
        """Tokens in ``max_bytes`` of plain text."""
        return self.max_bytes // BYTES_PER_TOKEN


def line_count(text: str) -> int:
    """The number of lines of *text*; a final line end starts no line."""
    return text.count("\n") + bool(text and not text.endswith("\n"))


def is_over(text: str, lines: int, size: int) -> bool:
    """True if *text* has more than *lines* lines or *size* bytes."""
    return line_count(text) > lines or len(text.encode("utf-8", "surrogatepass")) > size


def truncate(text: str, lines: int, size: int, *, tail: bool) -> str:
    """*text* in at most *lines* lines and *size* bytes, marker included; unchanged if it fits already.

    With *tail* its head and its end are kept, otherwise its head. It is cut between lines, or inside one that is too
    long by itself.
    """
    if not is_over(text, lines, size):
        return text
    marker = MIDDLE if tail else REST
    body = text.encode("utf-8", "surrogatepass")
    lines, size = lines - 1, size - len(marker) - 2
    if lines < 1 or size < 1:
        return marker
    end = b""
    if tail:
        end_lines, end_size = lines // 2, size // 2
        if end_lines:
            end = body[_tail(body, end_lines, end_size) :]
        lines, size = lines - end_lines, size - end_size
    head = body[: _head(body, lines, size)]
    pieces = [_text(head).removesuffix("\n"), marker, _text(end)]
    return "\n".join(piece for piece in pieces if piece)


def truncate_to(text: str, limits: TruncateLimits, tokens: int, count: Count, *, tail: bool) -> str:
    """*text* within *limits* and at most about *tokens*."""
    size = limits.max_bytes
    result = truncate(text, limits.max_lines, size, tail=tail)
    for _ in range(_TRIES):
        result_tokens = count(result)
        if result_tokens <= tokens or result in (MIDDLE, REST):  # nothing but the marker is left
            break
        size = min(size, len(result.encode("utf-8", "surrogatepass"))) * tokens * 31 // (result_tokens * 32)
        result = truncate(text, limits.max_lines, size, tail=tail)
    return result


def _head(body: bytes, lines: int, size: int) -> int:
    """The index where the head of *body* ends: after at most *lines* and *size* bytes, between characters."""
    end = _after_lines(body, lines)
    if end <= size:
        return end
    for edge in _EDGES:
        if (at := body.rfind(edge, size * 3 // 4, size)) >= 0:
            return at + 1
    return _character_start(body, size, -1)


def _tail(body: bytes, lines: int, size: int) -> int:
    """The index where the end of *body* starts: at most *lines* and *size* bytes before its end, between characters."""
    start = _before_lines(body, lines)
    if len(body) - start <= size:
        return start
    start = len(body) - size
    for edge in _EDGES:
        if (at := body.find(edge, start, start + size // 4)) >= 0:
            return at + 1
    return _character_start(body, start, 1)


def _after_lines(body: bytes, lines: int) -> int:
    at = 0
    for _ in range(lines):
        line_end = body.find(b"\n", at)
        if line_end < 0:
            return len(body)
        at = line_end + 1
    return at


def _before_lines(body: bytes, lines: int) -> int:
    at = len(body) - body.endswith(b"\n")
    for _ in range(lines):
        line_end = body.rfind(b"\n", 0, at)
        if line_end < 0:
            return 0
        at = line_end
    return at + 1


def _character_start(body: bytes, at: int, step: int) -> int:
    """The nearest start of a character from *at* on in the direction of *step*."""
    while 0 < at < len(body) and body[at] & 0xC0 == 0x80:
        at += step
    return at


def _text(body: bytes) -> str:
    return body.decode("utf-8", "surrogatepass")


# Single texts, to a number of tokens or characters.


def clip(text: str, tokens: int, count: Count) -> str:
    """*text* with its middle left out so that it takes at most *tokens*; unchanged if it fits already.

    It is never empty and never less than ``OMITTED``, even if that takes more than *tokens*: an API may refuse a
    message without text, as https://platform.claude.com/docs/en/api/messages does.
    """
    if count(text) <= max(tokens, count(OMITTED)):
        return text
    if tokens <= 0:
        return OMITTED
    marker = MARKER if tokens >= 3 * count(MARKER) else SHORT_MARKER
    room = tokens - count(marker)
    while room > 1:
        head = _beginning(text, int(room * HEAD_SHARE), count)
        tail = _ending(text, room - count(head), count)
        result = head.rstrip("\n") + marker + tail.lstrip("\n")
        if (excess := count(result) - tokens) <= 0:
            return result
        room -= excess  # the seams can cost a token that neither side does alone
    return _beginning(text, max(0, tokens), count) or OMITTED


def _beginning(text: str, tokens: int, count: Count) -> str:
    """The longest beginning of *text* that takes at most *tokens*, up to a line end if one is near."""
    fits = _fitting(lambda start, end: text[start:end], tokens, count)
    size = _longest(fits, tokens, len(text))
    return text[: _line_end(text, size)]


def _ending(text: str, tokens: int, count: Count) -> str:
    """The longest end of *text* that takes at most *tokens*, from the start of a line if one is near."""
    whole = len(text)
    fits = _fitting(lambda start, end: text[whole - end : whole - start], tokens, count)
    size = _longest(fits, tokens, whole)
    if size == 0:
        return ""
    start = whole - size
    line = text.find("\n", start, start + size // 4 + 1)
    if line >= 0:
        start = line + 1
    return text[start:]


def _line_end(text: str, size: int) -> int:
    """The last line end in the last quarter of ``text[:size]``, else *size*."""
    line = text.rfind("\n", size - size // 4, size)
    if line <= 0:
        return size
    return line


def _fitting(part: Callable[[int, int], str], tokens: int, count: Count) -> Callable[[int], bool]:
    """Tell if so many characters take at most *tokens*; *part* are the characters between two lengths.

    Of many characters only those behind a shorter part are counted, unless the sum is so near to *tokens* that a seam
    could decide.
    """
    known = [(0, 0)]

    def fits(size: int) -> bool:
        start, total = 0, 0
        if size >= _NEARLY_EXACT:
            start, total = max(each for each in known if each[0] <= size)
        total += count(part(start, size))
        if start and abs(total - tokens) <= _SEAMS:
            total = count(part(0, size))
        known.append((size, total))
        return total <= tokens

    return fits


def _longest(fits: Callable[[int], bool], tokens: int, most: int) -> int:
    """Nearly the largest length that *fits*: doubled from four characters a token, then found by binary search."""
    low, high = 0, min(most, max(16, tokens * 4))
    while high < most and fits(high):
        low, high = high, min(most, high * 2)
    if fits(high):
        return high
    while high - low > 1 + tokens // 8:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def shorten(text: str, characters: int) -> str:
    """*text* cut between words to at most *characters*, so that no name is left in half."""
    if len(text) <= characters:
        return text
    cut = next((at for at in range(characters, 0, -1) if text[at].isspace() or text[at - 1] >= _WIDE), 0)
    if not cut:
        return OMITTED
    return f"{text[:cut].rstrip()} {OMITTED}"


# Many items, to one level.


class Spared(msgspec.Struct, frozen=True):
    """Indexes of items that are cut after all others: those of ``users``, and results that are ``unread``."""

    users: Collection[int]
    unread: Collection[int]


def fair_level(sizes: Mapping[int, int], floors: Mapping[int, int], room: int) -> int:
    """The largest common cap for *sizes*, none below its floor, that takes at most *room*; at least zero."""
    low, high = 0, max(sizes.values(), default=0)
    alike = Counter((size, floors[i]) for i, size in sizes.items())  # thousands of items have few sizes
    while low < high:
        middle = (low + high + 1) // 2
        if sum(times * max(floor, min(size, middle)) for (size, floor), times in alike.items()) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def clip_levels(
    sizes: Mapping[int, int], floors: Mapping[int, int], spared: Spared, wanted: int, needed: int, least: int
) -> dict[int, int]:
    """The tokens that each item of *sizes* may keep so that *wanted* tokens are saved, or at least the *needed* ones.

    Items that are not *spared* are cut first. Unread results and users' words are cut only as far as *needed*, and
    users' words stay whole while that leaves each of the others *least* tokens.
    """
    both = {*spared.users, *spared.unread}
    total = sum(sizes.values())
    most, hard_limit = total - wanted, total - needed
    others = {i: size for i, size in sizes.items() if i not in both}
    spared_tokens = total - sum(others.values())
    level = fair_level(others, floors, most - spared_tokens)
    if level >= least:
        return _capped(sizes, floors, others, level)
    if not spared.unread:
        return _capped(sizes, floors, sizes, fair_level(sizes, floors, most))
    if sum(floors[i] for i in others) <= hard_limit - spared_tokens:
        return _capped(sizes, floors, others, fair_level(others, floors, hard_limit - spared_tokens))
    not_users = {i: size for i, size in sizes.items() if i not in spared.users}
    user_tokens = total - sum(not_users.values())
    level = fair_level(not_users, floors, hard_limit - user_tokens)
    if level >= least:
        return _capped(sizes, floors, not_users, level)
    return _capped(sizes, floors, sizes, fair_level(sizes, floors, hard_limit))


def _capped(sizes: Mapping[int, int], floors: Mapping[int, int], cut: Collection[int], level: int) -> dict[int, int]:
    """*sizes* with the items of *cut* brought down to *level*, none below its floor."""
    capped = dict(sizes)
    for i in cut:
        capped[i] = max(floors[i], min(sizes[i], level))
    return capped


# Definitions of tools, to less prose.


def shrink_tools(tools: bytes, tokens: int, count: Count) -> bytes:
    """The JSON array *tools*, which takes more than *tokens*, without white space if that is enough.

    Else it is the first level that takes at most *tokens*, or the last, which is tried first: if that is still too
    large, no other is written. *count* should remember what it counted.

    The same array and target give the same bytes on every call, so a provider's prompt cache keeps its prefix.
    """
    source = tools.decode()
    if not source.startswith("["):
        return tools
    try:
        # One tool at a time: while a large array is parsed or written at once, no other thread runs.
        parsed = [parse(source[start:end]) for start, end in elements(source, 0)[0]]
    except ValueError:
        return _minified_tools(source, tokens, count) or tools  # for example an integer that Python does not read
    smallest = _tools_at(parsed, *LEVELS[-1])
    if count(smallest.decode()) > tokens:
        return smallest
    if smaller := _minified_tools(source, tokens, count):
        return smaller
    for level in LEVELS[:-1]:
        result = _tools_at(parsed, *level)
        if count(result.decode()) <= tokens:
            return result
    return smallest


def _minified_tools(source: str, tokens: int, count: Count) -> bytes:
    """The JSON array *source* without white space; empty if it has none, or takes more than *tokens*."""
    smaller = minified(source)
    if len(smaller) < len(source) and count(smaller) <= tokens:
        return smaller.encode("utf-8", "backslashreplace")
    return b""


def _tools_at(parsed: list[Any], own: int, nested: int, examples: bool) -> bytes:
    """The JSON array of the tools *parsed*, with as much prose as one level leaves."""
    tools = (to_json(_tool(tool, own, nested, examples)) for tool in parsed)
    return f"[{','.join(tools)}]".encode()


def _tool(tool: Any, own: int, nested: int, examples: bool) -> Any:
    """One definition with less prose, in the format of any API."""
    if not isinstance(tool, dict):
        return tool
    function = tool.get("function")
    if isinstance(function, dict):
        return {**tool, "function": _tool(function, own, nested, examples)}
    smaller = {key: _tool_member(key, value, own, nested, examples) for key, value in tool.items()}
    if not own and isinstance(tool.get("description"), str):
        del smaller["description"]
    return smaller


def _tool_member(key: str, value: Any, own: int, nested: int, examples: bool) -> Any:
    """The value of a member of a definition with less prose."""
    if key == "description" and isinstance(value, str):
        return shorten(value, own)
    if key in _DECLARATIONS and isinstance(value, list):
        return [_tool(declaration, own, nested, examples) for declaration in value]
    if key in _SCHEMAS:
        return _schema(_without_unused(value), nested, examples)
    return value


def _without_unused(schema: Any) -> Any:
    """*schema* without the definitions that nothing in it refers to: what it accepts stays the same.

    Some servers send all their definitions with every tool.
    """
    if not isinstance(schema, dict) or not schema.keys() & {*_DEFINITIONS}:
        return schema
    if _OTHER_REFERENCES.search(json.dumps(schema)):
        return schema
    used = _used_definitions(schema)
    smaller = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    for holder in _DEFINITIONS:
        if left := {name: part for name, part in _definitions(schema, holder) if (holder, name) in used}:
            smaller[holder] = left
    return smaller


def _used_definitions(schema: dict[str, Any]) -> set[tuple[str, str]]:
    """The definitions, each with the keyword that holds it, that *schema* refers to, also from inside others."""
    definitions = {(holder, name): part for holder in _DEFINITIONS for name, part in _definitions(schema, holder)}
    referring: list[Any] = [{key: value for key, value in schema.items() if key not in _DEFINITIONS}]
    used: set[tuple[str, str]] = set()
    while referring:
        found = set(_REFERENCE.findall(json.dumps(referring.pop()))) & definitions.keys()
        referring += [definitions[each] for each in found - used]
        used |= found
    return used


def _definitions(schema: dict[str, Any], holder: str) -> Iterable[tuple[str, Any]]:
    """The names and schemas that the keyword *holder* defines."""
    defined = schema.get(holder)
    if isinstance(defined, dict):
        return defined.items()
    return ()


def _schema(schema: Any, nested: int, examples: bool) -> Any:
    """A JSON Schema with less prose. A property may have the name of a keyword: it is no keyword."""
    if isinstance(schema, list):
        return [_schema(part, nested, examples) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _keyword(key, value, nested, examples)
        for key, value in schema.items()
        if not _is_removed(key, value, nested, examples)
    }


def _is_removed(key: str, value: Any, nested: int, examples: bool) -> bool:
    """True if a keyword is removed: prose that is not only shortened, and examples unless they stay."""
    if key in PROSE and isinstance(value, str):
        return not nested or key != "description"
    return key in EXAMPLES and not examples


def _keyword(key: str, value: Any, nested: int, examples: bool) -> Any:
    """The value of a keyword that stays."""
    if key in PROSE and isinstance(value, str):
        return shorten(value, nested)
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _schema(part, nested, examples) for name, part in value.items()}
    if key in ("enum", "const", "required"):
        return value
    return _schema(value, nested, examples)
