"""Decides what a text, read as a row of notions, is about: tokens of a request, the output, a file, or another thing.

Who is too big decides more than how that is said: "history limit exceeded" is an overflow, "order history limit
exceeded" is none. A word that no notion is known of makes what stands behind it something else's (decision 35).
"""

from __future__ import annotations

import re

from proxy.core.overflow.lexicon import NOTIONS, Row, mentions

SENTENCE = re.compile(r"[^.]+")
"""A sentence of a row."""

_MEDIA_TOO_LARGE = re.compile(
    "{media}[_faLnNS]{{0,6}}{excess}|{media}[_faLJ]{{0,4}}{figure}{tokens}[_fa]{{0,2}}{over}".format(**NOTIONS)
)
_MEDIA_TO_SHORTEN = re.compile("{shorten}[_fa]{{0,3}}{length}[_fa]{{0,3}}{media}".format(**NOTIONS))
_FOREIGN = re.compile(r"[^\W\x00-\x7f]")
_OWN_WINDOW = re.compile("(?<![{foreign}{elsewhere}])[{window}{cap}{context}]".format(**NOTIONS))
_OWN_TOKENS = re.compile(f"(?<!{NOTIONS['foreign']}){NOTIONS['tokens']}")


def is_about_output(row: Row) -> bool:
    """True if *row* is about what the model says and names nothing that is sent."""
    if row.mentions("input", "context", "window"):
        return False
    return row.mentions("output") or (row.mentions("answer") and not row.mentions("request"))


def without_asides(row: Row) -> Row:
    """Return *row* without the sentences about something else, whose limits are not the window."""

    def blank(sentence: re.Match[str]) -> str:
        if not _is_aside(sentence[0]):
            return sentence[0]
        return "." * len(sentence[0])

    notions = SENTENCE.sub(blank, row.notions)
    return Row(notions, {at: figure for at, figure in row.figures.items() if notions[at] == NOTIONS["figure"]})


def _is_aside(sentence: str) -> bool:
    """True if *sentence* is about a rate, bytes alone, an option of the server, or something that it cannot load."""
    if mentions(sentence, "rate") or sentence.startswith("--"):
        return True
    if mentions(sentence, "load") and not mentions(sentence, "input"):
        return True
    return mentions(sentence, "bytes") and not mentions(sentence, "tokens", "window", "cap", "context")


def is_about_tokens(row: Row, *, beside_a_rate: bool) -> bool:
    """True if the figures of *row* can be tokens of a request; a text about a rate must also name the window."""
    if _OWN_WINDOW.search(row.notions):
        return True
    if beside_a_rate or row.mentions("operation") or (row.mentions("tools", "elsewhere") and not row.mentions("input")):
        return False
    if row.mentions("input") or names_own_tokens(row):
        return True
    return row.mentions("request") and not row.mentions("output", "tools")


def is_measured_only(row: Row) -> bool:
    """True if *row* states bytes or characters, and names nothing of a request that has so many.

    An image is such a thing, too: the window may be full of it.
    """
    if not row.mentions("bytes"):
        return False
    named = ("body", "request", "input", "talk", "tokens", "context", "window", "cap", "field", "media")
    return not row.mentions(*named)


def can_state_a_size(row: Row, text: str) -> bool:
    """True if figures in *text*, in words that no rule knows, can be the size of a request and its limit.

    It has to name something of a request, unless it is in other letters than English, whose words may all be unknown.
    """
    names_request = row.mentions("input", "context", "window", "cap") or names_own_tokens(row)
    if not (names_request or _FOREIGN.search(text)):
        return False
    if row.mentions("bytes", "media", "load", "time", "batch", "field", "elsewhere", "least", "operation"):
        return False
    return row.mentions("input") or not row.mentions("output", "tools")


def names_own_tokens(row: Row) -> bool:
    """True if *row* names tokens that no unknown word before them makes something else's ("operation token")."""
    return _OWN_TOKENS.search(row.notions) is not None


def complains_of_media(row: Row) -> bool:
    """True if *row* complains of an image or a file, or names nothing but one that is to be made smaller."""
    if _MEDIA_TO_SHORTEN.search(row.notions) and not row.mentions(
        "input", "talk", "tokens", "context", "window", "cap"
    ):
        return True
    return any(_complains_of_media(sentence[0]) for sentence in SENTENCE.finditer(row.notions))


def _complains_of_media(sentence: str) -> bool:
    """True if *sentence* complains of an image or a file, and not of a window."""
    if _MEDIA_TOO_LARGE.search(sentence):
        return True
    if not mentions(sentence, "media") or mentions(sentence, "window", "cap", "context"):
        return False
    return mentions(sentence, "over", "excess", "many", "figure")
