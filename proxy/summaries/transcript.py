"""A conversation as data: one bounded text per item, tags that would speak to a model neutralised, blobs left out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

from proxy.core.conversation import ItemText, Role

Count = Callable[[str], int]

USER, ASSISTANT, RESULT, ARGUMENTS = 16_000, 6_000, 2_000, 1_000
"""Characters of a text that are shown at most, by who wrote it; the middle goes."""

OPAQUE = 20_000
"""Characters without a space from which a run is data, not text."""

_DATA_URL = re.compile(r"data:[\w.+/-]{0,100};base64,[A-Za-z0-9+/=_-]{256,}")
# The look behind keeps these linear: a run is tried at its beginning only. Scripts without spaces are no data.
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{1200,}={0,2}")
_OPAQUE = re.compile(rf"(?<![^\s\u2e80-\uffff])[^\s\u2e80-\uffff]{{{OPAQUE},}}")
_SPECIAL = re.compile(r"<\|([^|<>\n]{0,64})\|>")
_TAG = re.compile(
    r"<(/?\s*(?:system|user|assistant|human|tool|developer|transcript|conversation|summary|instructions?|prompt"
    r"|function\w*|invoke|tool_\w+|s|bos|eos)\b)",
    re.IGNORECASE,
)
_BRACKETED = re.compile(r"\[(/?INST)\]|<<(/?SYS)>>")
_NAMES = {"user": "user", "assistant": "assistant", "tool": "tool result"}
_BREAK = re.compile(r"\s+")
BROKEN = 120
"""Characters within which the end of a word is looked for where a text is cut."""

MIDDLE = "[... middle left out ...]"


def omit_data(text: str) -> str:
    """*text* with encoded data replaced by a word about it: its size and a short digest."""
    if len(text) < 256:
        return text
    for pattern in (_DATA_URL, _BASE64, _OPAQUE):
        text = pattern.sub(_omitted, text)
    return text


def _omitted(match: re.Match[str]) -> str:
    run = match.group()
    if not run.startswith("data:") and len(run) < OPAQUE and not any(map(str.isdigit, run)):
        return run  # a long run of one letter or a rule of dashes is no data
    size = len(run) * 3 // 4
    digest = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"[... data left out: about {size} bytes, digest {digest} ...]"


def neutralised(text: str) -> str:
    """*text* in which nothing looks like a role, a special token or the end of what encloses it."""
    text = _SPECIAL.sub(r"‹\1›", text)
    text = _TAG.sub(r"‹\1", text)
    return _BRACKETED.sub(lambda match: f"({match[1] or match[2]})", text)


def quoted(text: str, characters: int) -> str:
    """The two ends of a slimmed *text*, at most so many *characters*, neutralised, each line behind a bar."""
    text = omit_data(text).encode("utf-8", "replace").decode()
    if len(text) > characters:
        head, tail = head_and_tail(text, characters // 2)
        text = f"{head}\n{MIDDLE}\n{tail}"
    return "\n".join(f"| {line}" for line in neutralised(text).splitlines())


def head_and_tail(text: str, characters: int) -> tuple[str, str]:
    """The first and the last at most so many *characters* of *text*, cut between words: half a name is none."""
    head, tail = text[:characters], text[-characters:]
    start = _BREAK.search(tail, 0, BROKEN)
    stop = next((at for at in range(len(head), max(0, len(head) - BROKEN), -1) if head[at - 1].isspace()), len(head))
    return head[:stop].rstrip(), tail[start.end() if start else 0 :]


def item_texts(entries: Sequence[ItemText], detail: float = 1.0) -> Iterator[str]:
    """One text per item that is no system item: who speaks, what was said, which tools were called, which media.

    *detail* scales how much is shown of what others than the user wrote.
    """
    for entry in entries:
        if entry.role == "system":
            continue
        limit = _limit(entry.role, detail)
        lines = [f"{_NAMES[entry.role]}:"]
        if entry.text:
            lines.append(quoted(entry.text, limit))
        if entry.said:
            lines += ["user:", quoted(entry.said, USER)]
        for name, arguments in entry.calls:
            lines += [f"calls {neutralised(name)}:", quoted(arguments, int(detail * ARGUMENTS))]
        lines += [f"({neutralised(kind)}, not shown)" for kind in entry.media]
        yield "\n".join(line for line in lines if line)


def _limit(role: Role, detail: float) -> int:
    """Return how many characters of an item's own text are shown."""
    if role == "user":
        return USER
    return int(detail * (ASSISTANT if role == "assistant" else RESULT))


def split_transcript(entries: Sequence[ItemText], tokens: int, count: Count, detail: float = 1.0) -> list[str]:
    """The transcript of *entries* in runs of at most *tokens* each, in order; a larger item loses its middle."""
    found: list[str] = []
    run: list[str] = []
    size = 0
    for piece in item_texts(entries, detail):
        weight = count(piece) + 2
        while weight > tokens and len(piece) > 200:
            keep = max(90, int(len(piece) * tokens / weight * 0.45))
            head, tail = head_and_tail(piece, keep)
            piece = f"{head}\n| {MIDDLE}\n| {tail}"
            weight = count(piece) + 2
        if run and size + weight > tokens:
            found.append("\n".join(run))
            run, size = [], 0
        run.append(piece)
        size += weight
    return [*found, "\n".join(run)] if run else found
