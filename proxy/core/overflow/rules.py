"""What providers say, as data: words that stand for notions, codes, and patterns of notions, each with its source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from proxy.core.overflow.words import NOTIONS, Lexicon

Meaning = Literal["input", "input_plus_output", "payload", "output_cap", "rate_limit", "other"]
Role = Literal["limit", "cap", "prompt", "output", "requested"]

MEANINGS: frozenset[str] = frozenset(get_args(Meaning))
ROLES: frozenset[str] = frozenset(get_args(Role))

LONGEST_PHRASE = 300
_GAPS = {"~": "[_KL]{0,5}?", "..": "[^.Nn]{0,8}?", "...": "[^.]{0,16}?", "....": ".{0,24}?"}
_PLAIN = frozenset("+->[,")
_HOLE = re.compile(r"\{(\w+)\}| ?(\*) ?")


class BadRule(ValueError):
    """A rule that cannot be understood; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A row of notions in which figures have roles."""

    source: str
    regex: re.Pattern[str]
    crosses: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """What it means when *pattern* is found in a sentence. ``strong``: it speaks of the window itself."""

    means: Meaning
    pattern: Pattern
    strong: bool = False

    def matches(self, notions: str) -> bool:
        """Return whether the pattern is found in *notions*."""
        return self.pattern.regex.search(notions) is not None


@dataclass(frozen=True, slots=True)
class Phrase:
    """What it means when a text holds a literal phrase, with the figures that stand in it."""

    means: Meaning
    source: str
    regex: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything the classifier knows. Made by ``read_rules``."""

    lexicon: Lexicon
    rules: tuple[Rule, ...]
    figures: tuple[Pattern, ...]
    phrases: tuple[Phrase, ...] = ()
    codes: Mapping[str, Meaning] = field(default_factory=dict)
    stops: frozenset[str] = frozenset()
    fields: Mapping[str, Role] = field(default_factory=dict)


def read_rules(data: Mapping[str, Any], own: Iterable[Mapping[str, Any]] = ()) -> Rules:
    """Return the rules in *data*, preceded by a user's *own*: codes and phrases. Raises ``BadRule``."""
    own = list(own)
    rows = [*own, *data["rules"]]
    return Rules(
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


def without(data: Mapping[str, Any], spoken_by: Iterable[str]) -> dict[str, Any]:
    """*data* without what only the sources named in *spoken_by* say; plain words of the language stay."""
    names = {name.lower() for name in spoken_by}

    def stays(row: Any) -> bool:
        sources = [source.strip().lower() for source in str(row["source"]).split(",")]
        return not all(any(name in source for name in names) for source in sources)

    kept = ("terms", "noise", "codes", "stops", "fields", "rules", "figures")
    return {key: [row for row in rows if stays(row)] if key in kept else rows for key, rows in data.items()}


def code_name(code: object) -> str:
    """A code without case, separators and the word "error": the same for every way of writing it."""
    return re.sub(r"[^a-z0-9]", "", str(code).lower()).removesuffix("error")


def phrase_regex(phrase: str) -> re.Pattern[str]:
    """A literal phrase as a pattern that takes linear time; ``{limit}`` and the like are figures, ``*`` is anything."""
    literal = " ".join(phrase.split())
    if not literal.replace("*", "").strip() or len(literal) > LONGEST_PHRASE:
        raise BadRule(f"a phrase has 1 to {LONGEST_PHRASE} characters: {phrase[:60]!r}")
    made, at, seen = [], 0, set[str]()
    for hole in _HOLE.finditer(literal):
        made.append(_literal(literal[at : hole.start()]))
        at = hole.end()
        if hole[2]:
            made.append(r"[\s\S]{0,80}?")
        elif hole[1] not in ROLES or hole[1] in seen:
            raise BadRule(f"{hole[0]!r} in a phrase must be one of {', '.join(sorted(ROLES))}, and stand there once")
        else:
            seen.add(hole[1])
            made.append(rf"(?P<{hole[1]}>\d[\d,_]{{0,14}})")
    if made.count(r"[\s\S]{0,80}?") > 4:
        raise BadRule(f"a phrase may hold * at most four times: {phrase[:60]!r}")
    made.append(_literal(literal[at:]))
    return re.compile("".join(made), re.IGNORECASE)


def _literal(text: str) -> str:
    return re.escape(text).replace(r"\ ", r"\s{1,4}")


def _listed(means: str | Sequence[str]) -> Sequence[str]:
    return [means] if isinstance(means, str) else means


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
    return Pattern(source, re.compile("".join(map(_part, parts)), re.DOTALL), "...." in parts)


def _part(part: str) -> str:
    if part in _GAPS:
        return _GAPS[part]
    if part in _PLAIN:
        return re.escape(part)
    if part.startswith("!"):
        return f"(?!{_GAPS['~']}{_letters(part[1:])})"
    if part.startswith("{"):
        return f"(?P<{_role(part.strip('{}'))}>N)"  # type: ignore[arg-type]
    return _letters(part.rstrip("?")) + ("?" if part.endswith("?") else "")


def _letters(names: str) -> str:
    try:
        return "[" + "".join(NOTIONS[name] for name in names.split("|")) + "]"
    except KeyError as error:
        raise BadRule(f"{error.args[0]!r} is no notion; there are {', '.join(NOTIONS)}") from None
