"""Rules to read error texts, as data (``config/overflow.yaml``): words, codes, and patterns, each with its source.

A rule is a pattern of notions (``lexicon``), so one rule covers the wordings of many servers (decision 20).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.overflow.lexicon import NOTIONS, Lexicon

Meaning = Literal["input", "input_plus_output", "payload", "output_cap", "rate_limit", "other"]
Role = Literal["limit", "cap", "prompt", "output", "requested"]

MEANINGS: frozenset[str] = frozenset(get_args(Meaning))
ROLES: frozenset[str] = frozenset(get_args(Role))

LONGEST_PHRASE = 300
"""Characters of a literal phrase that a user configures."""

_GAPS = {"~": "[_faKLosv]{0,5}?", "..": "[^.Nn]{0,8}?", "...": "[^.]{0,16}?", "....": ".{0,24}?"}
"""The regular expression for each gap in a pattern."""

_PHRASE_GAP = r"[\s\S]{0,80}?"
"""The regular expression for a ``*`` in a literal phrase."""

_MOST_GAPS = 4
"""Most gaps in a literal phrase."""

_PLAIN = frozenset("+->[,/")
_HOLE = re.compile(r"\{(\w+)\}| ?(\*) ?")


class BadRule(ValueError):
    """A rule that cannot be understood; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of notions in which figures have roles. It ``crosses`` if it may match across sentences."""

    source: str
    regex: re.Pattern[str]
    crosses: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """The meaning of sentences that match ``pattern``. ``strong``: they are about the window itself."""

    means: Meaning
    pattern: Pattern
    strong: bool

    def matches(self, notions: str) -> bool:
        """True if the pattern matches in *notions*."""
        return self.pattern.regex.search(notions) is not None


@dataclass(frozen=True, slots=True)
class Phrase:
    """The meaning of a text that holds a literal phrase, with the figures in it."""

    means: Meaning
    source: str
    regex: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class OverflowRules:
    """All rules of the classifier; ``read_rules`` builds them."""

    lexicon: Lexicon
    rules: tuple[Rule, ...]
    figures: tuple[Pattern, ...]
    phrases: tuple[Phrase, ...]
    codes: Mapping[str, Meaning]
    stops: frozenset[str]
    fields: Mapping[str, Role]


def read_rules(data: Mapping[str, Any], own: Iterable[Mapping[str, Any]] = ()) -> OverflowRules:
    """Return the rules in *data*, preceded by a user's *own* codes and phrases. Raises ``BadRule``."""
    own = list(own)
    rows = [*own, *data["rules"]]
    return OverflowRules(
        _lexicon(data),
        tuple(_rule(row) for row in rows if "says" in row),
        tuple(_pattern(row["says"], row["source"]) for row in data["figures"]),
        tuple(_phrase(row) for row in rows if "phrase" in row),
        {code_name(row["code"]): _meaning(row) for row in [*data["codes"], *own] if "code" in row},
        frozenset(code_name(row["reason"]) for row in data.get("stops", ())),
        {row["name"]: _role(row["means"]) for row in data.get("fields", ())},
    )


def _lexicon(data: Mapping[str, Any]) -> Lexicon:
    terms: list[tuple[str, Sequence[str]]] = [(term["word"], _listed(term["means"])) for term in data.get("terms", ())]
    for notion, lists in data["words"].items():
        terms += [(word, [notion]) for words in lists for word in words]
    try:
        return Lexicon(terms, [row["text"] for row in data.get("noise", ())])
    except KeyError as error:
        raise BadRule(f"{error.args[0]!r} is no notion") from None


def code_name(code: object) -> str:
    """Return *code* without case, separators and the word "error", so that all spellings of it are equal."""
    return re.sub(r"[^a-z0-9]", "", str(code).lower()).removesuffix("error")


def phrase_regex(phrase: str) -> re.Pattern[str]:
    """Return a literal phrase as a regular expression of linear time; ``{role}`` is a figure, ``*`` any text."""
    literal = " ".join(phrase.split())
    if not literal.replace("*", "").strip() or len(literal) > LONGEST_PHRASE:
        raise BadRule(f"a phrase has 1 to {LONGEST_PHRASE} characters: {phrase[:60]!r}")
    parts, at, roles = [], 0, set[str]()
    for hole in _HOLE.finditer(literal):
        parts.append(_literal(literal[at : hole.start()]))
        at = hole.end()
        if hole[2]:
            parts.append(_PHRASE_GAP)
        elif hole[1] not in ROLES or hole[1] in roles:
            raise BadRule(f"{hole[0]!r} in a phrase must be one of {', '.join(sorted(ROLES))}, and stand there once")
        else:
            roles.add(hole[1])
            parts.append(rf"(?P<{hole[1]}>\d[\d,_]{{0,14}})")
    if parts.count(_PHRASE_GAP) > _MOST_GAPS:
        raise BadRule(f"a phrase may hold * at most four times: {phrase[:60]!r}")
    parts.append(_literal(literal[at:]))
    return lazy_pattern("".join(parts), re.IGNORECASE)


def _literal(text: str) -> str:
    return re.escape(text).replace(r"\ ", r"\s{1,4}")


def _listed(means: str | Sequence[str]) -> Sequence[str]:
    if isinstance(means, str):
        return [means]
    return means


def _rule(row: Mapping[str, Any]) -> Rule:
    return Rule(_meaning(row), _pattern(row["says"], row["source"]), bool(row.get("strong")))


def _phrase(row: Mapping[str, Any]) -> Phrase:
    return Phrase(_meaning(row), row["source"], phrase_regex(row["phrase"]))


def _meaning(row: Mapping[str, Any]) -> Meaning:
    means: Meaning = row["means"]
    if means not in MEANINGS:
        raise BadRule(f"{means!r} is none of {', '.join(sorted(MEANINGS))}")
    return means


def _role(role: Role) -> Role:
    if role not in ROLES:
        raise BadRule(f"{role!r} is none of {', '.join(sorted(ROLES))}")
    return role


def _pattern(says: str, source: str) -> Pattern:
    parts = says.split()
    return Pattern(source, lazy_pattern("".join(map(_part, parts)), re.DOTALL), "...." in parts)


def _part(part: str) -> str:
    if part in _GAPS:
        return _GAPS[part]
    if part in _PLAIN:
        return re.escape(part)
    if part.startswith("!"):
        return f"(?!{_GAPS['~']}{_letters(part[1:])})"
    if part.startswith("="):
        return f"(?<![fH])(?<!f[KLIJMBXtws]){_letters(part[1:])}"
    if part.startswith("{"):
        return f"(?P<{_role(part.strip('{}'))}>N)"  # type: ignore[arg-type]
    letters = _letters(part.rstrip("?"))
    if part.endswith("?"):
        letters += "?"
    return letters


def _letters(names: str) -> str:
    try:
        return "[" + "".join(NOTIONS[name] for name in names.split("|")) + "]"
    except KeyError as error:
        raise BadRule(f"{error.args[0]!r} is no notion; there are {', '.join(NOTIONS)}") from None
