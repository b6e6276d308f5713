"""Tells if an answer is a context overflow, of which kind, and what it states.

An answer is read in this order, and what comes first decides:

1. An answer with status 200 that is no error: only the reason why generation stopped counts.
2. The body is taken apart (``error_body``): texts, codes, figures in members.
3. Each text: a phrase that a user configured; figures that say by themselves that something does not fit; a rule that
   speaks of the window; words about a pace; any other rule.
4. A code that a machine can read corrects the text. A text about the window outweighs a code about a pace.
5. Statuses of other troubles are believed only if the text speaks of the window, those about credentials only if a
   code does.
6. The claim is compared with what is known of the request (``evidence``), at first as it is. If that does not settle
   it, the texts are read again without what they only repeat of the request.

What a text says is read by rules that are data (``rules``). Figures get their roles by their place in a sentence, and
arithmetic checks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from proxy.core.apis.usage import read_usage
from proxy.core.content_encoding import decode_content
from proxy.core.overflow.error_body import ErrorParts, error_parts, is_error, parse_body
from proxy.core.overflow.evidence import NOTHING_KNOWN, EchoFilter, Prior, agrees, check_claim
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.rules import NOTIONS, Meaning, OverflowRules, Pattern, Phrase, Row, code_name, mentions
from proxy.core.report import Usage

SMALLEST_WINDOW = 64
"""A limit below this is a count of something else."""


@dataclass(frozen=True, slots=True)
class StatedFigures:
    """What a text states, in the provider's tokens; None for what it does not state.

    ``cap`` is the most output; ``whole`` means that ``prompt`` is all that was requested, whatever that is made of.
    """

    limit: int | None = None
    prompt: int | None = None
    output: int | None = None
    requested: int | None = None
    cap: int | None = None
    whole: bool = False

    @property
    def are_too_many(self) -> bool:
        """True if the figures by themselves say that something does not fit."""
        claim = self.requested or 0 if self.prompt is None else self.prompt + (self.output or 0)
        return self.limit is not None and claim >= self.limit

    def undivided(self) -> StatedFigures:
        """The same figures without the prompt, if that was only what the whole request takes."""
        return replace(self, prompt=None) if self.whole and self.output is None else self


def read_figures(row: Row, patterns: Iterable[Pattern]) -> StatedFigures:
    """Return the figures of *row* in their roles. Each figure has the role of the first pattern that names it."""
    named: set[int] = set()
    stated: dict[str, list[int]] = {}
    for roles in _role_places(row, patterns) if row.figures else ():
        if not named.isdisjoint(roles):
            continue
        named.update(roles)
        for place, role in roles.items():
            stated.setdefault(role, []).append(row.figures[place])
    return assign_roles(stated)


def _role_places(row: Row, patterns: Iterable[Pattern]) -> Iterator[dict[int, str]]:
    """Yield for each match of *patterns* in *row* the places of its figures, each with its role."""
    for pattern in patterns:
        at = 0
        while found := pattern.regex.search(row.notions, at):
            at = found.start() + 1
            yield {found.start(role): role for role in found.groupdict()}


def assign_roles(stated: Mapping[str, list[int]]) -> StatedFigures:
    """Figures out of all that was said in each role, most certain first."""
    output = next(iter(stated.get("output", ())), None)
    requested = next(iter(stated.get("requested", ())), None)
    limits = [limit for limit in stated.get("limit", ()) if limit >= SMALLEST_WINDOW]
    prompt = _prompt(stated.get("prompt", []), output, requested)
    if prompt is None and len(set(limits)) > 1:
        limits, prompt = [min(limits)], max(limits)
    claim = (prompt or 0) + (output or 0)
    limit = next((limit for limit in limits if limit <= claim), next(iter(limits), None))
    if limit is not None and prompt is not None and claim < limit / 2:
        limit = prompt = None  # whatever these figures are, they do not say that something is too long
    cap = next(iter(stated.get("cap", ())), None)
    whole = requested is not None and "prompt" not in stated and prompt == requested
    return StatedFigures(limit, prompt, output, requested, cap, whole)


def _prompt(parts: list[int], output: int | None, requested: int | None) -> int | None:
    """The tokens of the input: as stated, or the whole less the output if the parts add up to that."""
    whole = None if requested is None else requested - (output or 0)
    if whole is not None and whole >= 0 and (not parts or sum(parts) == whole):
        return whole
    return parts[0] if parts else None


LONGEST = 262_144
"""Bytes of an answer that are read."""

CAREFUL = frozenset({404, 405, 408, 409, 429})
"""Statuses of other troubles: here only what speaks of the window itself is believed to mean length."""

CREDENTIALS = frozenset({401, 402, 403})
"""Statuses about the credentials and what they paid for: here only a code is believed to mean length."""

ERROR_HEADERS = ("x-amzn-errortype", "x-error-code", "x-ms-error-code")
"""Headers that hold a code: of AWS (https://smithy.io/2.0/aws/protocols/aws-restjson1-protocol.html) and of Azure."""

_FIELD = "OpenAI, FastAPI"
_TOO_LONG = frozenset({"input", "input_plus_output", "payload"})
_CONTENT = re.compile(r"(?:^|[.\]])(?:messages?|input|system|contents?|prompt|instructions|text|output)(?:[.\[\]\d]*)$")
_SENTENCE = re.compile(r"[^.]+")
_CODE = re.compile(r"\b(?:[A-Za-z]{1,30}(?:_[A-Za-z]{1,30}){1,6}|(?:[A-Z][a-z]{1,30}){2,8})\b")


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one text means. ``strong``: it speaks of the window, or its own figures say so.

    ``names_input``: it speaks of the prompt. ``names_media``: the complaint is one sentence with an image or a file.
    """

    means: Meaning
    figures: StatedFigures
    strong: bool = False
    rule: str = ""
    names_input: bool = False
    names_media: bool = False


class Classifier:
    """Reads error answers by rules that are data."""

    def __init__(self, rules: OverflowRules) -> None:
        self._rules = rules
        self._crossing = [rule for rule in rules.rules if rule.pattern.crosses]
        self._within = [rule for rule in rules.rules if not rule.pattern.crosses]

    def answer(
        self, status: int, headers: Iterable[tuple[str, str]], body: bytes, prior: Prior = NOTHING_KNOWN
    ) -> Overflow | None:
        """The overflow that a whole answer reports; None if it is something else, or no error at all.

        *prior* is what is known of the request. Without it every claim is believed.
        """
        named = {name.lower(): value for name, value in headers}
        value = parse_body(decode_content(body, named.get("content-encoding", ""), LONGEST))
        if 200 <= status < 300 and not is_error(value):
            return self.stop(value)
        parts = error_parts(value)
        parts.codes += [named[name].split(":")[0] for name in ERROR_HEADERS if name in named]
        return self._judged(status, parts, prior)

    def event(self, value: Any, prior: Prior = NOTHING_KNOWN) -> Overflow | None:
        """The overflow that a decoded event of a stream or an error object reports; *prior* is known of the request."""
        if is_error(value):
            return self._judged(400, error_parts(value), prior)
        return self.stop(value)

    def stop(self, value: Any) -> Overflow | None:
        """The overflow of an answer that ended because generation ran into the window; it was billed."""
        reason = next((reason for reason in _reasons(value) if code_name(reason) in self._rules.stops), None)
        if reason is None:
            return None
        usage = _usage(value)
        return Overflow("stop", None, usage.input_tokens, usage.output_tokens, decisive=True, rule=str(reason))

    def _judged(self, status: int, parts: ErrorParts, prior: Prior) -> Overflow | None:
        """The claim that *parts* make, as far as it can be true of the request."""
        named = self._named(parts.texts)
        claim = self._verdict(status, replace(parts, codes=[*parts.codes, *named]))
        if claim is None or not claim.too_long or agrees(claim, prior):
            return check_claim(claim, prior)
        if prior.body:
            parts.texts = EchoFilter(prior.body).without(parts.texts)
            named = [code for code in named if code.encode() not in prior.body]
            claim = self._verdict(status, replace(parts, codes=[*parts.codes, *named]))
        return check_claim(claim, prior)

    def _named(self, texts: Iterable[str]) -> list[str]:
        """The listed codes of an overflow inside *texts*: gateways that have no member for a code put it there."""
        words = (word for text in texts for word in _CODE.findall(text))
        return [word for word in words if self._rules.codes.get(code_name(word)) in _TOO_LONG]

    def _verdict(self, status: int, parts: ErrorParts) -> Overflow | None:
        """The claim that *parts* make in an answer of *status*."""
        readings = [reading for text in parts.texts if (reading := self._text(text))]
        code, named = self._code(parts.codes)
        chosen = _chosen(readings)
        if chosen is None or (code is not None and chosen.means == "other" and not chosen.rule):
            figures = chosen.figures if chosen else StatedFigures()
            chosen = _Reading(code, figures, rule=named) if code else _by_status(status, readings, parts)
        elif code is not None:
            chosen = _with_code(chosen, code)
        if chosen is None or chosen.means == "other":
            return None
        return self._believed(status, chosen, parts, decisive=code in _TOO_LONG)

    def _believed(self, status: int, chosen: _Reading, parts: ErrorParts, *, decisive: bool) -> Overflow | None:
        """The claim of *chosen* if an answer of this *status* can make it; *decisive*: a code makes it."""
        if not chosen.strong and _is_elsewhere(chosen, parts.complained_of):
            return None
        if status in CREDENTIALS and not decisive:
            return None
        if status in CAREFUL and chosen.means in _TOO_LONG and not (decisive or chosen.strong):
            return Overflow("rate_limit", rule=chosen.rule) if status == 429 else None
        return _stated(chosen, _with_members(chosen, self._rules.fields, parts), decisive=decisive)

    def _text(self, text: str) -> _Reading | None:
        """What one text means; None if it means nothing that matters here."""
        for phrase in self._rules.phrases:
            if found := phrase.regex.search(text):
                return _phrased(phrase, found)
        row = self._rules.lexicon.read(text)
        sentences = [sentence.group() for sentence in _SENTENCE.finditer(row.notions)]
        reading = self._read(row, sentences)
        if reading is None:
            return None
        names_media = any(map(_complains_of_media, sentences))
        return replace(reading, names_input=row.mentions("input"), names_media=names_media)

    def _read(self, row: Row, sentences: Sequence[str]) -> _Reading | None:
        """What a text means by its figures, then by the rules that match its *row* or its *sentences*."""
        about_length = _without_asides(row)
        figures = StatedFigures()
        if not row.mentions("field", "batch"):
            figures = read_figures(about_length, self._rules.figures)
        matched = self._matching(row, sentences)
        if figures.are_too_many and _is_about_tokens(about_length, beside_a_pace=row.mentions("rate")):
            return _by_figures(figures, matched, about_length)
        if strong := next((reading for reading in matched if reading.strong), None):
            return replace(strong, figures=figures)
        if row.mentions("rate"):
            return _Reading("rate_limit", read_figures(row, self._rules.figures), rule="rate")
        if matched:
            return replace(matched[0], figures=figures)
        return _Reading("other", figures) if figures.limit else None

    def _matching(self, row: Row, sentences: Sequence[str]) -> list[_Reading]:
        """What the rules read in *row*: those that cross sentences, then the first that matches each sentence."""
        matched = [rule for rule in self._crossing if rule.matches(row.notions)]
        for sentence in sentences:
            if not mentions(sentence, "rate"):
                matched += islice((rule for rule in self._within if rule.matches(sentence)), 1)
        return [_Reading(rule.means, StatedFigures(), rule.strong, rule.pattern.source) for rule in matched]

    def _code(self, codes: Iterable[str]) -> tuple[Meaning | None, str]:
        """What machine-readable names mean, and the name that decides."""
        found: tuple[Meaning | None, str] = (None, "")
        for code in codes:
            means = self._meaning(code)
            if means in _TOO_LONG:
                return means, code
            if means in ("rate_limit", "other"):
                found = means, code
        return found

    def _meaning(self, code: str) -> Meaning | None:
        """What one name means: by the list, or by the words it is made of."""
        listed = self._rules.codes.get(code_name(code))
        if listed is not None or code.isdigit():
            return listed
        row = self._rules.lexicon.read(code)
        if row.mentions("rate"):
            return "rate_limit"
        readings = self._matching(row, [row.notions])
        return readings[0].means if readings else None


def _chosen(readings: Sequence[_Reading]) -> _Reading | None:
    """The reading that counts: one that speaks of the window, else of a pace, else the first one."""
    ranked = sorted(readings, key=lambda one: (not one.strong, one.means != "rate_limit", one.means == "other"))
    if not ranked:
        return None
    best = ranked[0]
    fuller = next((one for one in ranked if one.means == best.means and one.figures.limit), None)
    return best if best.figures.limit or fuller is None else fuller


def _with_code(chosen: _Reading, code: Meaning) -> _Reading | None:
    """*chosen* as corrected by a *code* beside it; None if the code names some other trouble."""
    if code == "rate_limit" and not chosen.strong:
        return replace(chosen, means="rate_limit")
    if code == "other":
        return None
    if code in _TOO_LONG and _yields(chosen):
        return replace(chosen, means=code)
    return chosen


def _yields(chosen: _Reading) -> bool:
    """True if a code says better what *chosen* is about: not if the text speaks of nothing but the output."""
    if chosen.means == "output_cap":
        return chosen.names_input and not chosen.figures.cap
    return chosen.means == "payload"


def _is_elsewhere(chosen: _Reading, place: str) -> bool:
    """True if another member of the request is too long, not the conversation."""
    if chosen.rule == _FIELD:
        return not _CONTENT.search(place)
    return chosen.means == "input" and bool(place) and not _CONTENT.search(place)


def _by_status(status: int, readings: Sequence[_Reading], parts: ErrorParts) -> _Reading | None:
    """The first reading; for an answer without a word the meaning of its status."""
    if readings:
        return readings[0]
    if status == 413 and not parts.texts and not parts.codes:
        return _Reading("payload", StatedFigures(), rule="status 413")
    return None


def _by_figures(figures: StatedFigures, matched: Sequence[_Reading], row: Row) -> _Reading:
    """The meaning of figures that say by themselves that something does not fit."""
    if row.mentions("output"):
        figures = figures.undivided()
    means: Meaning = "input"
    if figures.prompt is None:
        if any(reading.means == "input_plus_output" for reading in matched):
            means = "input_plus_output"
    elif figures.prompt < (figures.limit or 0):
        means = "input_plus_output"
    return _Reading(means, figures, strong=True, rule="figures")


def _phrased(phrase: Phrase, found: re.Match[str]) -> _Reading:
    """The meaning of a literal phrase that was found."""
    stated = {role: [int(re.sub(r"\D", "", value))] for role, value in found.groupdict().items() if value}
    return _Reading(phrase.means, assign_roles(stated), strong=phrase.means in _TOO_LONG, rule=phrase.source)


def _without_asides(row: Row) -> Row:
    """*row* without the sentences that speak of something else: no limit in them is the window."""

    def blank(sentence: re.Match[str]) -> str:
        return "." * len(sentence[0]) if _is_aside(sentence[0]) else sentence[0]

    notions = _SENTENCE.sub(blank, row.notions)
    return Row(notions, {at: figure for at, figure in row.figures.items() if notions[at] == NOTIONS["figure"]})


def _is_aside(sentence: str) -> bool:
    """True if *sentence* speaks of a pace, of bytes alone, or of what the server cannot load."""
    if mentions(sentence, "rate"):
        return True
    if mentions(sentence, "load") and not mentions(sentence, "input"):
        return True
    return mentions(sentence, "bytes") and not mentions(sentence, "tokens", "window", "context")


def _is_about_tokens(row: Row, *, beside_a_pace: bool) -> bool:
    """True if the figures of *row* can be tokens of a request; beside words about a pace only the window counts."""
    if row.mentions("window", "context"):
        return True
    if beside_a_pace:
        return False
    return row.mentions("input", "tokens") or (row.mentions("request") and not row.mentions("output"))


def _complains_of_media(sentence: str) -> bool:
    """True if *sentence* complains of an image or a file and names no window."""
    if not mentions(sentence, "media") or mentions(sentence, "window", "context"):
        return False
    return mentions(sentence, "over", "excess", "many", "figure")


def _with_members(chosen: _Reading, known: Mapping[str, str], parts: ErrorParts) -> StatedFigures:
    """The text's figures; if it states none, those that members of the error object state."""
    members: dict[str, list[int]] = {}
    for name, figure in parts.members:
        if name in known and figure > 0:
            members.setdefault(known[name], []).append(figure)
    figures = chosen.figures
    if figures.limit is not None or figures.prompt is not None:
        return figures
    stated = assign_roles(members)
    return replace(figures, limit=stated.limit, prompt=stated.prompt)


def _stated(chosen: _Reading, figures: StatedFigures, *, decisive: bool) -> Overflow:
    """The overflow that *chosen* reports with *figures*."""
    means = chosen.means
    assert means != "other"
    if means == "payload":
        return Overflow(means, decisive=decisive, rule=chosen.rule)
    if means == "output_cap":
        return Overflow(means, figures.cap, None, figures.output, rule=chosen.rule)
    limit, prompt, output = figures.limit, figures.prompt, figures.output
    if means == "input_plus_output" and limit is not None and prompt is not None and prompt >= limit:
        means = "input"
    return Overflow(means, limit, prompt, output, decisive, figures.requested, chosen.rule, chosen.names_media)


def _reasons(value: Any) -> Iterator[str]:
    """The reasons why generation ended, in the members where the APIs put them."""
    if not isinstance(value, dict):
        return
    choices = value.get("choices")
    response, delta = value.get("response"), value.get("delta")
    details = value.get("incomplete_details")
    holders = [value, *(choices if isinstance(choices, list) else ()), response, delta, details]
    if isinstance(response, dict):
        holders.append(response.get("incomplete_details"))
    for holder in holders:
        if isinstance(holder, dict):
            for member in ("stop_reason", "finish_reason", "reason", "native_finish_reason"):
                if isinstance(holder.get(member), str):
                    yield holder[member]


def _usage(value: Any) -> Usage:
    response = value.get("response")
    return read_usage(value.get("usage") or (response.get("usage") if isinstance(response, dict) else None))
