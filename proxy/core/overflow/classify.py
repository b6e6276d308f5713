"""Decides whether an answer is a context overflow, of which kind, and which figures it states.

Theory of operation
===================

The *claim* of an answer is the overflow that it seems to report. It is found in these steps:

1. An answer with status 200 that is no error claims an overflow only by the reason why generation stopped.
2. Any other body is split (``error_body``) into texts, codes and figures in members.
3. Each text gets a meaning, by the first of these that applies: a phrase that a user configured; figures that by
   themselves do not fit; a rule about the window; words about a rate; any other rule.
4. A machine-readable code corrects the meaning of the text. A text about the window outweighs a code about a rate.
5. With a status outside ``FITTING``, a claim counts only if the text is about the window; with one about credentials,
   only if a code makes it, or if our count exceeds the limit that it states, or if it names prompt and window and
   states no figure.
6. A text that no rule matches makes a claim if it states exactly two figures; it counts only if they agree with our
   count.
7. The claim is compared with the facts of the request (``evidence``). If these do not confirm it, the texts are read
   again without the parts that only repeat the request.

Texts are read by rules that are data (``rules``). A figure gets its role by its position in the sentence, and the
figures of a text are checked by arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from proxy.core.apis.usage import read_usage
from proxy.core.content_encoding import decode_content
from proxy.core.overflow.error_body import ErrorParts, error_parts, is_error, parse_body
from proxy.core.overflow.evidence import NO_PRIOR, EchoFilter, Prior, check_claim, states_size_of
from proxy.core.overflow.figures import LEAST_LIMIT, LEAST_SIZE, StatedFigures, assign_roles, read_figures, stated_size
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.lexicon import Row, mentions
from proxy.core.overflow.rules import Meaning, OverflowRules, Phrase, Role, code_name
from proxy.core.overflow.subjects import (
    SENTENCE,
    can_state_a_size,
    complains_of_media,
    is_about_output,
    is_about_tokens,
    is_measured_only,
    names_own_tokens,
    without_asides,
)
from proxy.core.report import Usage

LONGEST = 262_144
"""Bytes of an answer that are read: errors are shorter, and most of what is longer repeats the request."""

FITTING = frozenset({200, 400, 413, 422, 424, 500, 502})
"""Statuses of refused requests. With any other, only a text about the window itself is an overflow.

With 429 that has to state the limit, too: of the errors collected here none with that status was about a window.
"""

PAYMENT = 402
"""The status of a lack of credit."""

ABOUT_CREDENTIALS = frozenset({401, PAYMENT, 403})
"""Statuses about credentials and payment: with them, only a code or a limit below our count is an overflow.

With 401 and 403, a text without figures about the prompt and the window is one, too. Together answers 403:
https://docs.together.ai/docs/error-codes
"""

ERROR_HEADERS = ("x-amzn-errortype", "x-error-code", "x-ms-error-code")
"""Headers that hold a code.

Of AWS: https://smithy.io/2.0/aws/protocols/aws-restjson1-protocol.html
Of Azure: https://github.com/microsoft/api-guidelines/blob/vNext/azure/Guidelines.md#handling-errors
"""

_FIELD = "OpenAI, FastAPI"
"""The source of the rule about a member that is too long."""

_FIGURES = "figures"
"""The source of the meaning of figures that by themselves do not fit."""

_TOO_LONG = frozenset({"input", "input_plus_output", "payload"})
"""Meanings after which a smaller view may succeed."""

_CONTENT = re.compile(
    r"(?:^|[.\]])(?:messages?|input|system|contents?|prompt|instructions|text|output|content-length)(?:[.\[\]\d]*)$"
)
_INDEXED = re.compile(r"(\w+)(?:\[\d|\.\d)")
"""A list in the path of a member: the first one says whether it is a part of the conversation ("nodes[3].text")."""

_LISTS = ("message", "input", "content", "prompt", "system", "conversation", "history", "turn", "request", "instance")
"""Beginnings of the names of lists that a conversation is sent in."""

_CODE = re.compile(r"\b(?:[A-Za-z]{1,30}(?:_[A-Za-z]{1,30}){1,6}|(?:[A-Z][a-z]{1,30}){2,8})\b")


@dataclass(frozen=True, slots=True)
class _Reading:
    """The meaning of one text. ``strong``: the text is about the window, or its figures by themselves do not fit.

    ``names_input``: it mentions the prompt; ``names_tokens``: tokens. ``names_media``: it complains of an image or a
    file. ``guessed``: no words of it say what its figures are. ``plausible``: it names tokens or the prompt, and by
    their roundness its figures are a count and a limit. ``about_output``: it mentions output and nothing that is sent.
    ``stated`` are all of its figures that can be tokens, ``size`` the most bytes or characters in it.
    """

    means: Meaning
    figures: StatedFigures
    strong: bool = False
    rule: str = ""
    names_input: bool = False
    names_window: bool = False
    names_tokens: bool = False
    names_media: bool = False
    guessed: bool = False
    plausible: bool = False
    about_output: bool = False
    stated: tuple[int, ...] = ()
    size: int | None = None
    names_body: bool = False


class Classifier:
    """Reads error answers by rules that are data."""

    def __init__(self, rules: OverflowRules) -> None:
        self._rules = rules
        self._crossing = [rule for rule in rules.rules if rule.pattern.crosses]
        self._within = [rule for rule in rules.rules if not rule.pattern.crosses]

    def answer(
        self, status: int, headers: Iterable[tuple[str, str]], body: bytes, prior: Prior = NO_PRIOR
    ) -> Overflow | None:
        """Return the overflow that a whole answer reports; None if it reports something else, or no error at all.

        *prior* has the facts of the request. Without them every claim counts.
        """
        header = {name.lower(): value for name, value in headers}
        value = parse_body(decode_content(body, header.get("content-encoding", ""), LONGEST))
        if 200 <= status < 300 and not is_error(value):
            return self.stop(value)
        parts = error_parts(value)
        parts.codes += [header[name].split(":")[0] for name in ERROR_HEADERS if name in header]
        return self._checked_claim(status, parts, prior)

    def event(self, value: Any, prior: Prior = NO_PRIOR) -> Overflow | None:
        """Return the overflow that a decoded event of a stream or an error object reports; *prior* as in ``answer``."""
        if is_error(value):
            return self._checked_claim(400, error_parts(value), prior)
        return self.stop(value)

    def stop(self, value: Any) -> Overflow | None:
        """Return the overflow of an answer that ended because generation reached the window; else None."""
        reason = next((reason for reason in _reasons(value) if code_name(reason) in self._rules.stops), None)
        if reason is None:
            return None
        usage = _usage(value)
        return Overflow("stop", None, usage.input_tokens, usage.output_tokens, decisive=True, rule=str(reason))

    def _checked_claim(self, status: int, parts: ErrorParts, prior: Prior) -> Overflow | None:
        """Return the claim that *parts* make if it can be true of the request, else None."""
        codes = [*parts.embedded_codes, *self._codes_in(parts.texts)]
        claim = self._claim(status, replace(parts, codes=[*parts.codes, *codes]))
        if claim is None or not claim.too_long or states_size_of(claim, prior):
            return check_claim(claim, prior)
        if prior.body:
            parts.texts = EchoFilter(prior.body).without_echoes(parts.texts)
            codes = [code for code in codes if code.encode() not in prior.body]
            claim = self._claim(status, replace(parts, codes=[*parts.codes, *codes]))
        return check_claim(claim, prior)

    def _codes_in(self, texts: Iterable[str]) -> list[str]:
        """Return the listed codes of an overflow inside *texts*: gateways without a member for codes put them there."""
        words = (word for text in texts for word in _CODE.findall(text))
        return [word for word in words if self._rules.codes.get(code_name(word)) in _TOO_LONG]

    def _claim(self, status: int, parts: ErrorParts) -> Overflow | None:
        """Return the claim that *parts* make in an answer of *status*."""
        readings = [reading for text in parts.texts if (reading := self._read_text(text))]
        code, name = self._meaning_of_codes(parts.codes)
        in_members = assign_roles(self._by_role(parts.members))
        chosen = _best_reading(readings, in_members)
        if code == "other" and chosen and chosen.strong and code_name(name) not in self._rules.codes:
            code = None  # words about the window outweigh those of a code, which may be in a language of its own
        chosen = _with_code(chosen, code, name) or _by_status(status, parts)
        if chosen is None or chosen.means == "other":
            return None
        chosen = replace(chosen, stated=tuple(figure for reading in readings for figure in reading.stated))
        # "Requested context 131072 exceeds model limit 32768" with a code that only sounds alike is a setting, perhaps.
        # The words of a code that nobody listed say no more than a text whose limit can be held against our count.
        is_clear = code_name(name) in self._rules.codes or not (chosen.guessed or chosen.figures.limit)
        return _claim_by_status(status, chosen, parts, in_members, decisive=code in _TOO_LONG and is_clear)

    def _read_text(self, text: str) -> _Reading | None:
        """Return the meaning of one text; None if it is about something else."""
        for phrase in self._rules.phrases:
            if match := phrase.regex.search(text):
                return _by_phrase(phrase, match)
        row = self._rules.lexicon.read(text)
        sentences = [sentence.group() for sentence in SENTENCE.finditer(row.notions)]
        reading = self._read_row(text, row, sentences)
        if reading is None:
            return None
        about_output = is_about_output(row)
        if about_output and reading.means == "input" and not reading.strong:
            reading = replace(reading, means="output_cap")
        return replace(
            reading,
            names_input=row.mentions("input"),
            names_window=row.mentions("window", "cap", "context"),
            names_tokens=row.mentions("tokens"),
            names_media=complains_of_media(row),
            about_output=about_output,
            stated=tuple(row.figures.values()),
            size=stated_size(text),
            names_body=row.mentions("body"),
        )

    def _read_row(self, text: str, row: Row, sentences: Sequence[str]) -> _Reading | None:
        """Return the meaning of a text by its figures, else by the rules that match its *row* or its *sentences*."""
        about_length = without_asides(row)
        figures = StatedFigures()
        if not row.mentions("field", "batch"):
            figures = read_figures(about_length, self._rules.figures)
        matched = self._matching(row, sentences)
        if figures.are_too_many and is_about_tokens(about_length, beside_a_rate=row.mentions("rate")):
            return _by_figures(figures, matched, about_length)
        if strong := next((reading for reading in matched if reading.strong), None):
            return replace(strong, figures=figures)
        if row.mentions("rate"):
            return _Reading("rate_limit", read_figures(row, self._rules.figures), rule="rate")
        if matched and matched[0].means == "payload" and is_measured_only(row):
            return _Reading("other", figures, rule=matched[0].rule)
        if matched:
            return replace(matched[0], figures=figures)
        return _guess(row, text) or _Reading("other", figures)

    def _matching(self, row: Row, sentences: Sequence[str]) -> list[_Reading]:
        """Return the meanings by rules: those that cross sentences, then the first match of each sentence."""
        matched = [rule for rule in self._crossing if rule.matches(row.notions)]
        for sentence in sentences:
            if not mentions(sentence, "rate"):
                matched += islice((rule for rule in self._within if rule.matches(sentence)), 1)
        return [_Reading(rule.means, StatedFigures(), rule.strong, rule.pattern.source) for rule in matched]

    def _by_role(self, members: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
        """The figures of *members* by their roles."""
        by_role: dict[str, list[int]] = {}
        for name, figure in members:
            role = self._rules.fields.get(name) or self._role_of_member(name)
            if role is not None and figure > 0:
                by_role.setdefault(role, []).append(figure)
        return by_role

    def _role_of_member(self, name: str) -> Role | None:
        """The role of the figure in a member by the words that its *name* is made of."""
        row = self._rules.lexicon.read(name)
        if row.mentions("output", "bytes", "rate", "batch"):
            return None
        if row.mentions("window", "cap") or (row.mentions("most") and row.mentions("input", "context")):
            return "limit"
        if row.mentions("input") and row.mentions("tokens"):
            return "prompt"
        return None

    def _meaning_of_codes(self, codes: Iterable[str]) -> tuple[Meaning | None, str]:
        """Return the meaning of *codes*, and the code that decides it."""
        decisive: tuple[Meaning | None, str] = (None, "")
        for code in codes:
            means = self._meaning_of_code(code)
            if means in _TOO_LONG:
                return means, code
            if means in ("rate_limit", "other"):
                decisive = means, code
        return decisive

    def _meaning_of_code(self, code: str) -> Meaning | None:
        """Return the meaning of one code: by the list, else by its words."""
        listed = self._rules.codes.get(code_name(code))
        if listed is not None or code.isdigit():
            return listed
        row = self._rules.lexicon.read(code)
        if row.mentions("rate") and not row.mentions("excess"):
            return "rate_limit"
        readings = self._matching(row, [row.notions])
        if not readings:
            return None
        return readings[0].means


def _claim_by_status(
    status: int, chosen: _Reading, parts: ErrorParts, in_members: StatedFigures, *, decisive: bool
) -> Overflow | None:
    """Return the claim of *chosen* if it counts with this *status*, else None; *decisive*: a code makes it."""
    if _is_elsewhere(chosen, parts.member_at_fault):
        return None
    if not decisive and not _fits(status, chosen):
        if status == 429:
            return Overflow("rate_limit", rule=chosen.rule)
        return None
    figures = chosen.figures
    if chosen.guessed and decisive:
        figures = StatedFigures()  # they are what they seem if they agree with our count, and else nothing
    figures = _with_members(figures, in_members)
    claim = _overflow(chosen, figures, decisive=decisive)
    has_figures = bool(claim.stated) or claim.limit is not None
    needs_count = chosen.guessed or (status in ABOUT_CREDENTIALS and has_figures)
    return replace(claim, unlikely=needs_count and not decisive, plausible=chosen.plausible)


def _fits(status: int, chosen: _Reading) -> bool:
    """True if an answer with *status* can mean what *chosen* does, without a code that says so."""
    states_window = chosen.strong and chosen.names_window and chosen.figures.limit is not None
    if status in ABOUT_CREDENTIALS:
        names_both = chosen.names_input and chosen.names_window and chosen.figures.limit is None
        return states_window or (names_both and status != PAYMENT)
    if status in FITTING or chosen.means not in _TOO_LONG:
        return True
    if status == 429:
        return states_window
    return chosen.strong


def _best_reading(readings: Sequence[_Reading], in_members: StatedFigures) -> _Reading | None:
    """The reading that decides: one about the window, else figures *in_members*, else one about a rate, else the first.

    Of readings with the same meaning, the first one that states a limit.
    """
    ranked = sorted(readings, key=_rank)
    if in_members.are_too_many and not (ranked and ranked[0].strong):
        return _Reading("input", in_members, strong=True, rule="members", names_window=True)
    if not ranked:
        return None
    best = ranked[0]
    return next((reading for reading in ranked if reading.means == best.means and reading.figures.limit), best)


def _rank(reading: _Reading) -> tuple[bool, bool, bool]:
    """Return the sort key of *reading*: about the window first, then about a rate, "other" last."""
    return not reading.strong, reading.means != "rate_limit", reading.means == "other"


def _with_code(chosen: _Reading | None, code: Meaning | None, name: str) -> _Reading | None:
    """*chosen* as corrected by the meaning of a code of this *name*; None if the code names another trouble."""
    if code is None:
        return chosen
    if chosen is None:
        return _Reading(code, StatedFigures(), rule=name)
    if chosen.means == "other" and not chosen.rule and not chosen.about_output:
        return _Reading(code, chosen.figures, rule=name)
    if code == "rate_limit" and not chosen.strong:
        return replace(chosen, means="rate_limit")
    if code == "other":
        return None
    if code in _TOO_LONG and _defers_to_code(chosen):
        return replace(chosen, means=code)
    return chosen


def _defers_to_code(chosen: _Reading) -> bool:
    """True if a code outweighs the text of *chosen*. It does not if the text is about the output alone."""
    if chosen.means == "output_cap":
        return chosen.names_input and not chosen.figures.cap
    return chosen.means == "payload"


def _is_elsewhere(chosen: _Reading, member: str) -> bool:
    """True if the *member* at fault is not part of the conversation, or the limit too small for one."""
    # vLLM, "param": "input_tokens": "This model's maximum context length is 8192 tokens. However, your request has 6012
    # input tokens plus 4096 'max_tokens'." What names the window is about the conversation, whatever the member is.
    if chosen.strong and (chosen.names_window or chosen.rule != _FIGURES):
        return False
    # "Conversation limit reached (20)" is about the number of conversations.
    if chosen.figures.small_limit:
        return True
    # "messages too long (max 100)" counts them.
    if (chosen.figures.limit or LEAST_SIZE) < LEAST_SIZE and not (chosen.names_window or chosen.names_tokens):
        return True
    # "Secret is too long. Maximum length is 64 bytes."
    if chosen.means == "payload" and chosen.size is not None and chosen.size < LEAST_SIZE:
        return True
    # OpenAI: "Invalid 'user': string too long. Expected maximum length 64 but got 128" is elsewhere, and a complaint
    # without a member, too. FastAPI, "loc": ["body", "messages", 0, "content"]: "String should have at most 100000
    # characters" is not.
    if chosen.rule == _FIELD:
        return not _is_content(member)
    # OpenAI, "param": "logit_bias": "Invalid 'logit_bias': too many tokens. Expected at most 300 tokens, got 512."
    return chosen.means in ("input", "payload") and bool(member) and not _is_content(member)


def _is_content(member: str) -> bool:
    """True if *member*, a name or a path, is a part of the conversation."""
    listed = _INDEXED.search(member)
    return bool(_CONTENT.search(member)) and (listed is None or listed[1].lower().startswith(_LISTS))


def _by_status(status: int, parts: ErrorParts) -> _Reading | None:
    """Return the meaning of *status* for an answer without any text or code."""
    if status == 413 and not parts.texts and not parts.codes:
        return _Reading("payload", StatedFigures(), rule="status 413")
    return None


def _by_figures(figures: StatedFigures, matched: Sequence[_Reading], row: Row) -> _Reading:
    """Return the meaning of figures that alone prove that something does not fit."""
    # "Prompt and output require 9312 tokens but the maximum is 8192": the figure may be both together.
    if row.mentions("output"):
        figures = figures.undivided()
    means: Meaning = "input"
    if figures.prompt is None:
        # TGI: "total number of tokens (prompt and prediction) cannot exceed 2048 - received 6354"; not Cerebras:
        # "reduce the length of the messages or completion. Current length is 42328 while limit is 40000".
        if any(reading.means == "input_plus_output" for reading in matched):
            means = "input_plus_output"
    # Anthropic: "input length and max_tokens exceed context limit: 156321 + 48384 > 200000": the prompt alone fits.
    elif figures.prompt < (figures.limit or 0):
        means = "input_plus_output"
    # "--ctx-size 1048576 is more than this build supports (524288)" has the form of "Context length 9214 is greater
    # than max_seq_len 8192": a setting and what the server can do, or prompt and limit. Only our count knows which.
    guessed = figures.inferred and not row.mentions("input")
    reading = _Reading(means, figures, strong=True, rule=_FIGURES, guessed=guessed)
    return replace(reading, plausible=names_own_tokens(row) and figures.are_a_count_above_a_limit)


def _guess(row: Row, text: str) -> _Reading | None:
    """Return the meaning of a *text* that no rule matches, if it states two figures that can be prompt and limit."""
    stated = sorted({figure for figure in row.figures.values() if figure >= LEAST_LIMIT})
    if len(stated) != 2 or not can_state_a_size(row, text):
        return None
    limit, prompt = stated
    figures = StatedFigures(limit, prompt)
    names_prompt = row.mentions("input") or names_own_tokens(row)
    plausible = names_prompt and figures.are_a_count_above_a_limit
    return _Reading("input", figures, rule="our count", guessed=True, plausible=plausible)


def _by_phrase(phrase: Phrase, match: re.Match[str]) -> _Reading:
    """Return the meaning of a literal phrase, at its *match*."""
    by_role = {role: [int(re.sub(r"\D", "", value))] for role, value in match.groupdict().items() if value}
    is_strong = phrase.means in _TOO_LONG
    return _Reading(phrase.means, assign_roles(by_role), is_strong, phrase.source, names_window=is_strong)


def _with_members(figures: StatedFigures, in_members: StatedFigures) -> StatedFigures:
    """*figures* of a text; if it states none, those *in_members* of the error object."""
    if figures.limit is not None or figures.prompt is not None:
        return figures
    return replace(figures, limit=in_members.limit, prompt=in_members.prompt)


def _overflow(chosen: _Reading, figures: StatedFigures, *, decisive: bool) -> Overflow:
    """Return the overflow that *chosen* reports with *figures*."""
    means = chosen.means
    assert means != "other"
    if means == "payload":
        claim = Overflow(means, decisive=decisive, rule=chosen.rule, names_media=chosen.names_media)
        return replace(claim, stated=chosen.stated, size=chosen.size, names_body=chosen.names_body)
    if means == "output_cap":
        return Overflow(means, figures.cap, None, figures.output, rule=chosen.rule)
    limit, prompt, output = figures.limit, figures.prompt, figures.output
    if means == "input_plus_output" and limit is not None and prompt is not None and prompt >= limit:
        means = "input"
    claim = Overflow(means, limit, prompt, output, decisive, figures.requested, chosen.rule, chosen.names_media)
    return replace(claim, stated=chosen.stated)


def _reasons(value: Any) -> Iterator[str]:
    """Yield the reasons why generation ended, from the members in which the APIs state them.

    Messages: https://platform.claude.com/docs/en/build-with-claude/handling-stop-reasons
    OpenRouter: https://openrouter.ai/announcements/standardized-finish-reasons
    """
    for holder in _objects_with_reasons(value):
        for member in ("stop_reason", "finish_reason", "reason", "native_finish_reason"):
            if isinstance(holder.get(member), str):
                yield holder[member]


def _objects_with_reasons(value: Any) -> list[dict[str, Any]]:
    """Return the objects of an answer or event that may hold a reason."""
    if not isinstance(value, dict):
        return []
    holders = [value, value.get("response"), value.get("delta"), value.get("incomplete_details")]
    if isinstance(value.get("choices"), list):
        holders[1:1] = value["choices"]
    if isinstance(value.get("response"), dict):
        holders.append(value["response"].get("incomplete_details"))
    return [holder for holder in holders if isinstance(holder, dict)]


def _usage(value: Any) -> Usage:
    """Return the usage in an answer, or in the response inside an event of the Responses API."""
    usage, response = value.get("usage"), value.get("response")
    if not usage and isinstance(response, dict):
        usage = response.get("usage")
    return read_usage(usage)
