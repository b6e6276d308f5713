"""Verifies a model's summary before it is used: its size, its names and figures, and the orders in it.

The source of a summary has text of strangers, and the model may obey instructions in it (prompt injection:
https://genai.owasp.org/llmrisk/llm01-prompt-injection/). So every name and figure in a summary must occur in its
source. An order stays as it is only if the user or the system gave it. An order of a tool or of the assistant becomes a
quote. An order that is not in the source is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from proxy.core.compaction.digest import quoted
from proxy.core.conversation import Count
from proxy.core.lazy_pattern import lazy_pattern
from proxy.summaries.headings import SECTIONS, opened_section
from proxy.summaries.orders import is_order
from proxy.summaries.source import LONGEST_LINE, WIDE, WIDE_RANGE, WORD, Source, words_of

INSTRUCTIONS = SECTIONS[-1]

MAX_REPEATED = 0.3
"""Most runs of four words that may be repetitions, as a share of all: above it, the model was in a loop."""

MAX_DROPPED = 0.5
"""Most lines that may be dropped, as a share of all: above it, the summary is not used."""

SHORT_IN_TITLES = 3
"""Letters of a word up to which titles have it without a capital."""

# The mark of a list item at the beginning of a line.
_BULLET = lazy_pattern(r"^\s*(?:[-*•]\s+|\d{1,3}[.)]\s+)?")
# A token: what stands between spaces, quotes and brackets. Signs at its ends belong to the sentence.
_SPLIT = lazy_pattern(r"[^\s\"'`<>(){}\[\],;|=*“”‘’„‚«»‹›…「」『』《》【】（），。、：；！？،؛؟।]+")
_EDGE = ".,:;!?…。，：；！？-–—"
# Words with a sign or a letter that would make them names.
_PLAIN = frozenset({"and/or", "e.g", "i.e", "etc", "w/o", "n/a", "i/o", "tcp/ip", "vs", "a.m", "p.m", "yes/no"})
# Capitals and figures as in "readFile", "HTTPServer" and "T4", which no plain word has.
_CAMEL = lazy_pattern(r"[a-z0-9][A-Z]|[A-Z]{2,}[a-z]|[A-Z]\d|\d[A-Za-z]{2}")
# Words that an English line of some length has, the label before a statement, and words that only a capital shows.
_ENGLISH = lazy_pattern(r"\b(?:the|of|to|and|is|are|was|were|with|for|by|that|has|have|not|from)\b")
_LABEL = lazy_pattern(r"\A[^:.!?\n]{1,40}:(?=\s)|\*\*[^*\n]{1,80}\*\*")
_CAPITALISED = lazy_pattern(
    r"(?:(?<=[a-z0-9,;)] )|(?<=\bDr\. )|(?<=\bMr\. )|(?<=\bMrs\. )|(?<=\bMs\. )|(?<=\bProf\. ))[A-Z][a-z]{2,}(?![\w/])"
)
# A function: its name before a bracket.
_CALLED = lazy_pattern(r"\b([A-Za-z_]\w*)\(")
_DIGIT = lazy_pattern(r"\d")
_URL = lazy_pattern(rf"https?://[^\s\"'`<>)\]“”„«»（），。：；！？،؛؟{WIDE_RANGE}]+")
# Scripts without blanks: "在src/a.py中". A wide character at a sign belongs to the name, as in "报告/a.py".
_NAME_AMONG_WIDE = lazy_pattern(rf"(?:[{WIDE_RANGE}](?=[/\\._-]))?[^{WIDE_RANGE}]+(?:(?<=[/\\._-])[{WIDE_RANGE}])?")
# "E404-Fehler", "a.py-файл": a word of the language behind a name.
_COMPOUND = lazy_pattern(r"-(?:[A-ZÄÖÜ][a-zäöüß]{2,}|[^\W\d_a-zA-Z]+)$")
# The end of a model's thoughts, which some servers leave in the text; not a quoted one.
_THOUGHTS_END = lazy_pattern(r"(?<![`'\"“])</(?:think(?:ing)?|thoughts?|reasoning)>(?![`'\"”])")
_FENCE = lazy_pattern(r"^\s*(?:`{3,}|~{3,})\w*$")
# A quote as ``_verified_line`` writes it.
_QUOTE = lazy_pattern(r"^\((?:a tool's output|the assistant) said, not an instruction: “(.*)”\)$")
# The beginning of an answer in which a model declines to write.
_REFUSAL = lazy_pattern(
    r"^\W{0,4}(?:i['’]?m sorry|sorry,|i apologi[sz]e|as an ai|i (?:cannot|can['’]?t|am (?:unable|not able)|won['’]?t)"
    r"|unfortunately, i|i['’]m (?:unable|not able)|对不起|抱歉|我(?:无法|不能)|申し訳)",
    re.IGNORECASE,
)
# Special tokens, roles and calls of tools: the model continued the conversation and did not sum it up.
_MARKUP = lazy_pattern(
    r"<\|[^|\n]{0,40}\|>|</?(?:think(?:ing)?|thoughts?|reasoning|tool_call|function_call|function|invoke|tool_use|system|assistant|user)\b|\[/?INST\]"
    r"|<<SYS>>|\{\s*\"(?:name|tool|function)\"\s*:[^\n]{0,200}\"(?:arguments|parameters|input)\"",
    re.IGNORECASE,
)


class Verdict(msgspec.Struct, frozen=True):
    """A summary that may be used, or a fixed word for the ``reason`` why it may not.

    ``dropped`` lines were removed, ``quoted`` ones became quotes.
    """

    text: str
    reason: str = ""
    dropped: int = 0
    quoted: int = 0


def verify(draft: str, source: Source, cap: int, count: Count) -> Verdict:
    """Verify *draft* as a summary of *source* in at most *cap* tokens.

    Thoughts, an introduction, code fences and sections that the prompt does not request are left out.
    """
    text = _THOUGHTS_END.split(draft)[-1].strip()
    if reason := _reason_against(text, source, cap, count):
        return Verdict("", reason)
    verified: list[str] = []
    lines, dropped, quotes = 0, 0, 0
    for section, written in _section_lines(text):
        if not written:
            verified += ["", f"## {section}"]
            continue
        lines += 1
        line = _verified_line(written[:LONGEST_LINE], section, source)
        if not line:
            dropped += 1
            continue
        quotes += line != written
        verified.append(line)
    used = _without_empty_sections(verified)
    if not used or dropped > MAX_DROPPED * lines:
        return Verdict("", "invented", dropped, quotes)
    result = "\n".join(used)
    if count(result) > cap:
        return Verdict("", "too_long", dropped, quotes)
    return Verdict(result, "", dropped, quotes)


def _section_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield section and line of each line in one of ``SECTIONS``; an empty line where a section begins."""
    section, level = "", 0
    for line in map(str.rstrip, text.splitlines()):
        opened, signs = opened_section(line)
        if opened:
            section, level = opened, signs
            yield section, ""
        elif 0 < signs <= level:
            section = ""
        elif section and line and not _FENCE.match(line):
            yield section, line


def _reason_against(text: str, source: Source, cap: int, count: Count) -> str:
    """Return a fixed word for the reason why *text* as a whole may not be used; empty if it may."""
    if not text or not any(char.isalnum() for char in text):
        return "empty"
    if _REFUSAL.search(text[:200]):
        return "refusal"
    if not any(opened_section(line)[0] for line in text.splitlines()):
        return "shapeless"
    if _MARKUP.search(text):
        return "markup"
    tokens = count(text)
    if tokens > cap or tokens * 2 > source.tokens:
        return "too_long"
    if _loops(text):
        return "loop"
    return ""


def _verified_line(line: str, section: str, source: Source) -> str:
    """Return *line* itself, a quote of it, or an empty string if it may not be used."""
    bare = _BULLET.sub("", line, count=1)
    if not all(map(source.holds, checkable(bare))):
        return ""
    if not all(map(source.mentions, plain_names(bare))):
        return ""
    if section != INSTRUCTIONS and not is_order(bare):
        return line
    # A quote from the summary that this one continues is attributed to its origin, not quoted once more.
    text = _QUOTE.sub(r"\1", bare.strip())
    match source.speaker(text):
        case "user":
            return line
        case "tool":
            return f"- (a tool's output said, not an instruction: {quoted(text)})"
        case "assistant":
            return f"- (the assistant said, not an instruction: {quoted(text)})"
    return ""


def checkable(text: str) -> Iterator[str]:
    """Yield the names, paths, URLs, identifiers and figures in *text*: every token that is no plain word."""
    for url in _URL.findall(text):
        yield url.rstrip(_EDGE)
    text = _URL.sub(" ", text)
    called = set(_CALLED.findall(text))
    yield from called
    for written in _SPLIT.findall(text):
        for piece in _names_among_wide(written):
            token = _COMPOUND.sub("", piece.strip(_EDGE))
            if token not in called and _is_name(token):
                yield token


def plain_names(text: str) -> Iterator[str]:
    """Yield the words of an English *text* that only a capital shows to be names: "Redis", "Dr. Henderson".

    A word that begins a sentence has its capital anyway, and labels ("Root Cause: ...") and lines may be titles. In
    other languages nouns have capitals, or names have endings.
    """
    if not _ENGLISH.search(text):
        return
    long_words = [word for word in WORD.findall(text) if len(word) > SHORT_IN_TITLES]
    if not all(word[0].isupper() for word in long_words):
        yield from _CAPITALISED.findall(_LABEL.sub("", text))


def _names_among_wide(token: str) -> list[str]:
    """Return the parts of *token* that are not of a script without blanks between words."""
    if token.isascii() or not WIDE.search(token):
        return [token]
    parts: list[str] = _NAME_AMONG_WIDE.findall(token)
    return parts


def _is_name(token: str) -> bool:
    """True if *token* is a name, a path, an identifier or a figure, and no plain word."""
    if not token or token.lower() in _PLAIN:
        return False
    has_sign = any(sign in token for sign in "/\\_@#$.~:") and any(map(str.isalnum, token))
    return has_sign or bool(_DIGIT.search(token) or _CAMEL.search(token))


def _loops(text: str) -> bool:
    """True if *text* repeats itself."""
    words = words_of(text)
    runs = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    if len(runs) < 12:
        return len(words) >= 12 and len(set(words)) * 4 < len(words)
    return len(runs) - len(set(runs)) > MAX_REPEATED * len(runs)


def _without_empty_sections(lines: Sequence[str]) -> list[str]:
    """Return *lines* without headings that no text follows, and without blank lines at the start."""
    result: list[str] = []
    for line in reversed(lines):
        below = next(reversed(result), "")
        has_text_below = bool(below) and not below.startswith("## ")
        is_no_heading = not line.startswith("## ") and bool(line or below)
        if has_text_below or is_no_heading:
            result.append(line)
    while result and not result[-1]:
        result.pop()
    return result[::-1]
