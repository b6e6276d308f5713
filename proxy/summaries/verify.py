"""What a model's summary must be before it is used: bounded, grounded in what it sums up, and no voice of its own.

A summary is made of text that strangers wrote, by a model that may do as they say. So every name and figure in it
must occur in its source, and an order in it is kept only if the user or the system gave that order; what a tool or
the assistant said stands as a quote, what nobody said goes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from proxy.core.compaction.digest import quoted
from proxy.core.conversation import ItemText

Count = Callable[[str], int]

SECTIONS = (
    "Goal",
    "Instructions from the user",
    "Key decisions",
    "Accomplished",
    "In progress",
    "Relevant files",
    "Identifiers and errors",
)
"""The headings a summary may have; at least one must be there."""

INSTRUCTIONS = SECTIONS[1]

MOST_REPEATED = 0.3
"""Share of a text's four-word runs that may occur before in it: above, it loops."""

MOST_INVENTED = 0.5
"""Share of a summary's lines that may go before what is left is not worth using."""

OVERLAP = 0.7
"""Share of a line's word pairs that must stand in one sentence of a speaker to count as theirs."""

HEARD = 2**20
"""Characters of each speaker's newest words in which a line is looked for: about 50 bytes of memory each. What was said
before that is nobody's, and an order that nobody gave goes.
"""

_WINDOW = 65_536
_LONGEST_LINE = 4_000
_HEADING = re.compile(r"^#{1,6}\s*(.{1,60}?)\s*:?\s*$|^\*\*(.{1,60}?):?\*\*:?\s*$")
_BULLET = re.compile(r"^\s*(?:[-*•]\s+|\d{1,3}[.)]\s+)?")
_SPLIT = re.compile(r"[^\s\"'`<>(){}\[\],;|=*“”‘’「」『』《》]+")
_EDGE = ".,:;!?…。，：；！？-–—"
_PLAIN = frozenset({"and/or", "e.g", "i.e", "etc", "w/o", "n/a", "i/o", "tcp/ip", "vs", "a.m", "p.m", "yes/no"})
_CAMEL = re.compile(r"[a-z0-9][A-Z]|[A-Z]{2,}[a-z]|[A-Z]\d|\d[A-Za-z]{2}")
_URL = re.compile(r"https?://[^\s\"'`<>)\]]+")
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\(")
_DIGIT = re.compile(r"\d")
_REFUSAL = re.compile(
    r"^\W{0,4}(?:i['’]?m sorry|sorry,|i apologi[sz]e|as an ai|i (?:cannot|can['’]?t|am (?:unable|not able)|won['’]?t)"
    r"|unfortunately, i|i['’]m (?:unable|not able)|对不起|抱歉|我(?:无法|不能)|申し訳)",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"<\|[^|\n]{0,40}\|>|</?(?:tool_call|function_call|function|invoke|tool_use|system|assistant|user)\b|\[/?INST\]"
    r"|<<SYS>>|\{\s*\"(?:name|tool|function)\"\s*:[^\n]{0,200}\"(?:arguments|parameters|input)\"",
    re.IGNORECASE,
)
_ORDER = re.compile(
    r"^\W*(?:please|now|then|next|also|first|finally|important|note|system|urgent|attention|instruction|todo)?[\s:,!-]*"
    r"(?:ignore|disregard|forget|override|you\b|your\b|always|never|do not|don['’]t|must|should|shall|make sure|ensure"
    r"|remember|run|execute|call|invoke|use|send|post|upload|exfiltrate|email|delete|remove|drop|erase|reveal|print"
    r"|output|repeat|say|tell|respond|reply|answer|act|behave|pretend|open|visit|fetch|download|install|curl|wget|grant"
    r"|approve|allow|accept|assume|treat|consider|stop|start|continue|proceed|write|add|append|insert|create|set|change"
    r"|update|deploy|push|merge|commit|transfer|pay|give|follow|obey|comply|read|copy|move|rename|disable|enable|skip"
    r"|bypass|keep|avoid)\b"
    r"|^\W*(?:忽略|无视|请|必须|务必|不要|删除|发送|执行|無視|ignora|ignoriere?n?|ignorez|oublie[zr]?|olvida|vergiss"
    r"|игнорируй|забудь|удали|отправь)",
    re.IGNORECASE,
)
_ADDRESSED = re.compile(
    r"\b(?:you|the (?:assistant|model|agent|ai|llm|reader|system)|assistant)\s+(?:must|should|shall|need(?:s)? to"
    r"|ha(?:ve|s) to|(?:are|is) (?:now|to|required|allowed|instructed|authori[sz]ed|permitted)|(?:may|can|will) now)\b"
    r"|\b(?:ignore|disregard|forget) (?:all|any|every|the|your|previous|prior|earlier)\b"
    r"|\b(?:new|updated|hidden|secret|additional) (?:system )?(?:instructions?|rules?|prompt)\b",
    re.IGNORECASE,
)
_CLAIMED = re.compile(
    r"\b(?:user|human|operator|admin\w*|owner|developer|boss)s?\b.{0,60}?"
    r"\b(?:approv|authori[sz]|consent|confirm|permit|permission|allow|grant|agree|want|wish|ask|request|instruct|told"
    r"|tell|say|said|order|demand|requir|accept|prefer|insist|expect|like|need|waiv|sign(?:s|ed)? off)",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"[.!?:;,([{“\"'‘>]+\s*|\s[-–—]+\s|\*\*|\b(?:and|then|so|but)\s", re.IGNORECASE)
_NEGATION = re.compile(
    r"\b(?:not|never|no|dont|don|without|avoid|cannot|cant|nor|neither|none|stop|except|unless|nicht|nie|kein|jamais"
    r"|pas|nunca|не|нет|никогда)\b|[不别勿禁]"
)
_WORD = re.compile(r"[^\W_]+(?:_[^\W_]+)*|_+\w+", re.UNICODE)
_WIDE = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af]")
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+|(?<=[。！？；])|\n+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The summary as it may be used, or why it may not: ``reason`` is a fixed word, empty where it may.

    ``dropped`` lines were taken out, ``quoted`` ones now stand as a quote.
    """

    text: str
    reason: str = ""
    dropped: int = 0
    quoted: int = 0


class Source:
    """What a summary is about: *entries*, and their weight in *tokens*. Built once, asked for every draft."""

    def __init__(self, entries: Sequence[ItemText], tokens: int) -> None:
        self.tokens = tokens
        self._left = {"user": HEARD, "tool": HEARD, "assistant": HEARD}
        self._said: dict[str, list[_Sentence]] = {"user": [], "tool": [], "assistant": []}
        self._index: dict[str, dict[str, set[int]]] = {"user": {}, "tool": {}, "assistant": {}}
        for entry in reversed(entries):
            speaker = "user" if entry.role in ("user", "system") else entry.role
            self._hear(speaker, entry.text)
            if entry.said:
                self._hear("user", entry.said)
            for _, arguments in entry.calls:
                self._hear("assistant", arguments)
        self._text = "\n".join(text for entry in entries for text in _texts(entry))
        self._lowered = self._text.lower()

    def holds(self, token: str) -> bool:
        """Whether *token* stands in the source as a whole."""
        return _stands(token, self._text) or _stands(token.lower(), self._lowered)

    def speaker(self, line: str) -> str:
        """Who said *line*, nearly in these words: ``user`` (or the system), ``tool``, ``assistant``, or nobody."""
        sentence = _Sentence(line)
        return next((who for who in ("user", "tool", "assistant") if self._was_said(who, sentence)), "")

    def _hear(self, speaker: str, text: str) -> None:
        said, index = self._said[speaker], self._index[speaker]
        text = text[: self._left[speaker]]
        self._left[speaker] -= len(text)
        for start in range(0, len(text), _WINDOW):
            for piece in _SENTENCE.split(text[start : start + _WINDOW]):
                sentence = _Sentence(piece[:_LONGEST_LINE])
                for pair in sentence.pairs:
                    index.setdefault(pair, set()).add(len(said))
                if sentence.pairs:
                    said.append(sentence)

    def _was_said(self, speaker: str, line: _Sentence) -> bool:
        if not line.pairs:
            return False
        shared: Counter[int] = Counter()
        for pair in line.pairs:
            shared.update(self._index[speaker].get(pair, ()))
        enough = OVERLAP * len(line.pairs)
        said = self._said[speaker]
        return any(
            count >= enough and (line.negated == said[at].negated or speaker != "user")
            for at, count in shared.most_common(20)
        )


class _Sentence:
    """The pairs of neighbouring words of a text, and whether it denies something."""

    __slots__ = ("negated", "pairs")

    def __init__(self, text: str) -> None:
        words = list(_words(text))
        self.negated = bool(_NEGATION.search(" ".join(words)))
        self.pairs = {f"{a} {b}" for a, b in pairwise(words)} or set(words)


def verify(draft: str, source: Source, cap: int, count: Count) -> Verdict:
    """*draft* as it may be used for *source* in at most *cap* tokens, or why it may not."""
    text = draft.strip()
    if reason := _unfit(text, source, cap, count):
        return Verdict("", reason)
    kept: list[str] = []
    section, lines, dropped, quoted = "", 0, 0, 0
    for raw in text.splitlines():
        heading = _heading(raw)
        if heading:
            section = heading
            kept += ["", f"## {heading}"]
            continue
        if not raw.strip():
            continue
        lines += 1
        said = _judged(raw.rstrip()[:_LONGEST_LINE], section, source)
        dropped += not said
        quoted += said != raw.rstrip() and bool(said)
        if said:
            kept.append(said)
    used = _without_empty(kept)
    if not used or dropped > MOST_INVENTED * lines:
        return Verdict("", "invented", dropped, quoted)
    result = "\n".join(used)
    if count(result) > cap:
        return Verdict("", "too_long", dropped, quoted)
    return Verdict(result, "", dropped, quoted)


def _texts(entry: ItemText) -> Iterator[str]:
    """Yield the text of an item and its calls, arguments also without the escapes of JSON."""
    yield entry.text
    for name, arguments in entry.calls:
        yield name
        yield arguments
        if "\\" in arguments:
            yield arguments.replace("\\\\", "\\").replace('\\"', '"').replace("\\/", "/")


def _unfit(text: str, source: Source, cap: int, count: Count) -> str:
    """What is wrong with *text* as a whole; empty where nothing is."""
    if not text or not any(char.isalnum() for char in text):
        return "empty"
    headed = any(map(_heading, text.splitlines()))
    if _REFUSAL.search(text[:200]):
        return "refusal"
    if not headed:
        return "shapeless"
    if _MARKUP.search(text):
        return "markup"
    tokens = count(text)
    if tokens > cap or tokens * 2 > source.tokens:
        return "too_long"
    return "loop" if _loops(text) else ""


def _heading(line: str) -> str:
    """The section that *line* opens, or an empty string."""
    found = _HEADING.match(line.strip())
    if not found:
        return ""
    title = (found[1] or found[2]).strip("* :").lower()
    return next((section for section in SECTIONS if section.lower() == title), "")


def _judged(line: str, section: str, source: Source) -> str:
    """*line* as it may stand: itself, as a quote, or not at all."""
    bare = _BULLET.sub("", line, count=1)
    if not all(map(source.holds, checkable(bare))):
        return ""
    if section != INSTRUCTIONS and not _commands(bare):
        return line
    match source.speaker(bare):
        case "user":
            return line
        case "":
            return ""
        case speaker:
            who = "a tool's output" if speaker == "tool" else "the assistant"
            return f"- ({who} said, not an instruction: {quoted(bare.strip())})"


def _commands(line: str) -> bool:
    """Whether any part of *line* reads like an order to its reader, or claims that somebody gave one."""
    if _ADDRESSED.search(line) or _CLAIMED.search(line):
        return True
    return any(map(_ORDER.search, _CLAUSE.split(line)))


def checkable(text: str) -> Iterator[str]:
    """The names, paths, URLs, identifiers and figures of *text*: whatever is no plain word."""
    for url in _URL.findall(text):
        yield url.rstrip(_EDGE)
    text = _URL.sub(" ", text)
    called = set(_CALLED.findall(text))
    yield from called
    for match in _SPLIT.finditer(text):
        token = match.group().strip(_EDGE)
        if not token or token.lower() in _PLAIN or token in called:
            continue
        inner = any(mark in token for mark in "/\\_@#$.~:") and any(map(str.isalnum, token))
        if inner or _DIGIT.search(token) or _CAMEL.search(token):
            yield token


def _stands(token: str, text: str) -> bool:
    """Whether *token* occurs in *text* and is not merely a part of a longer word or figure."""
    at = text.find(token)
    while at >= 0:
        end = at + len(token)
        before, after = text[at - 1 : at], text[end : end + 1]
        if not (_joins(before) and _joins(token[0])) and not (_joins(after) and _joins(token[-1])):
            return True
        at = text.find(token, at + 1)
    return False


def _joins(char: str) -> bool:
    return bool(char) and (char.isalnum() or char == "_") and not _WIDE.match(char)


def _words(text: str) -> Iterator[str]:
    for match in _WORD.finditer(text.replace("'", "").replace("’", "").lower()):
        word = match.group()
        if _WIDE.search(word):
            yield from word
        else:
            yield word


def _loops(text: str) -> bool:
    words = list(_words(text))
    runs = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    if len(runs) < 12:
        return len(words) >= 12 and len(set(words)) * 4 < len(words)
    return len(runs) - len(set(runs)) > MOST_REPEATED * len(runs)


def _without_empty(lines: Sequence[str]) -> list[str]:
    """Return *lines* without headings that no text follows, and without blank lines before the first one."""
    kept: list[str] = []
    for line in reversed(lines):
        below = kept[-1] if kept else ""
        has_text_below = bool(below) and not below.startswith("## ")
        is_no_heading = not line.startswith("## ") and bool(line or below)
        if has_text_below or is_no_heading:
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return kept[::-1]
