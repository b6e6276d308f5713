"""Cuts things short that are too large: tool results, single texts, many items at once.

A text that was cut always says that something is missing. The same input is cut in the same way every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from proxy.core.conversation import Count

MIDDLE = "[... the middle of this output was left out to save room; run a narrower command to see it ...]"
REST = "[... the rest was left out to save room; ask for a later or narrower part to see it ...]"

HEAD_ONLY = frozenset({"file_read", "grep", "glob", "list", "web_fetch", "web_search", "search_semantic"})
"""Kinds of tools whose results keep only their head. All others keep their end too: it says how the call went."""

BYTES_PER_TOKEN = 4
"""Bytes of a text that is not known, or of a body, that count as one token."""

_TRIES = 8
"""Times that a result is cut again to come near a number of tokens."""

_AIMED_BELOW, _NEAR = 512, 128
"""Parts of a number of tokens: one is aimed below it, since tokens do not grow evenly; so near to it is near enough."""

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


# Tool results, to a number of lines, bytes and tokens.


class TruncateLimits(msgspec.Struct, frozen=True):
    """The most bytes that a tool result keeps, and the share of the room that it may take, when room is short."""

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
        lines, size = lines - end_lines, size - len(end)
    head = body[: _head(body, lines, size)]
    pieces = [_text(head).removesuffix("\n"), marker, _text(end)]
    return "\n".join(piece for piece in pieces if piece)


def truncate_to(text: str, lines: int, size: int, tokens: int, count: Count) -> str:
    """*text* in at most *lines* lines, *size* bytes and nearly *tokens*: its head and its end."""
    longer = truncate(text, lines, size, tail=True)
    longer_tokens = count(longer)
    if longer_tokens <= tokens or longer in (MIDDLE, REST):
        return longer
    shorter, shorter_tokens, size = MIDDLE, count(MIDDLE), min(size, _size(longer))
    least = _size(MIDDLE)
    for _ in range(_TRIES):
        # Tokens grow with bytes nearly in proportion: what is between the two sizes is divided accordingly.
        missing = max(0, tokens - shorter_tokens - tokens // _AIMED_BELOW)
        step = (size - least) * missing // max(1, longer_tokens - shorter_tokens)
        result = truncate(text, lines, least + step, tail=True)
        if result == shorter:
            break
        if result == longer:
            size = least + step * 7 // 8  # cut at the same edge: the next one is further inside
            continue
        result_tokens = count(result)
        if result_tokens > tokens:
            longer, longer_tokens, size = result, result_tokens, least + step
            continue
        shorter, shorter_tokens, least = result, result_tokens, least + step
        if tokens - result_tokens <= tokens // _NEAR:
            break
    return shorter


def _size(text: str) -> int:
    """Bytes of *text*."""
    return len(text.encode("utf-8", "surrogatepass"))


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
