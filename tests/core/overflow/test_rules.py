"""How rules are read: codes, phrases and patterns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.rules import (
    LONGEST_PHRASE,
    MEANINGS,
    ROLES,
    BadRule,
    code_name,
    phrase_regex,
    read_rules,
)
from proxy.settings import packaged_overflow_rules
from tests.support.overflow_rules import without_sources

DATA = packaged_overflow_rules()


def found(own: dict[str, str], body: bytes) -> Any:
    return Classifier(read_rules(DATA, [{"source": "mine", **own}])).answer(400, (), body)


def test_every_rule_names_its_source() -> None:
    """Words of the language apart, each line of the data says who speaks so."""
    for part in ("terms", "noise", "codes", "stops", "fields", "rules", "figures"):
        assert DATA[part]
        assert all(row["source"].strip() for row in DATA[part])


def test_the_packaged_rules_mean_known_things() -> None:
    """What a rule means and a figure's role are words that someone reads."""
    rules = read_rules(DATA)
    assert {rule.means for rule in rules.rules} | set(rules.codes.values()) <= MEANINGS
    assert {name for pattern in rules.figures for name in pattern.regex.groupindex} <= ROLES
    assert set(rules.fields.values()) <= ROLES
    assert rules.phrases
    assert rules.stops


@pytest.mark.parametrize("at", range(len(DATA["figures"])))
def test_every_pattern_of_figures_names_one(at: int) -> None:
    """A pattern without a figure would never do anything."""
    assert "{" in DATA["figures"][at]["says"]


def test_a_provider_can_be_left_out() -> None:
    """What only one provider says goes with it; what others say too, and the words, stay."""
    less = without_sources(DATA, ["moonshot", "llama.cpp"])
    sources = {row["source"] for row in less["rules"]}
    assert "llama.cpp" not in sources
    assert any("llama.cpp" in source for source in sources)
    assert less["words"] == DATA["words"]
    assert len(less["codes"]) < len(DATA["codes"])
    read_rules(less)


def test_a_phrase_of_ones_own() -> None:
    """A user's phrase is found before anything else, whatever the case, and its figures are read."""
    rule = {"means": "input", "phrase": "basket holds {limit} beans * brought {prompt}"}
    one = found(rule, b'{"error": "The Basket  holds 8,192 beans, and you have brought 9000."}')
    assert (one.kind, one.limit, one.prompt, one.rule) == ("input", 8192, 9000, "mine")


def test_a_code_of_ones_own() -> None:
    """A user's code is found in any way of writing it, and may say that something is no overflow."""
    assert found({"means": "input", "code": "basket-full"}, b'{"code": "BasketFullError"}').decisive
    body = b'{"error": {"code": "odd_limit", "message": "prompt is too long"}}'
    assert found({"means": "other", "code": "odd_limit"}, body) is None


@pytest.mark.parametrize(
    "phrase", ["", "  ", "*", "**", "{window} tokens", "{limit} {limit}", "x" * (LONGEST_PHRASE + 1), "a*b*c*d*e*f"]
)
def test_phrases_that_cannot_be(phrase: str) -> None:
    """A phrase that matches anything, takes long, or names an unknown figure is refused with a reason."""
    with pytest.raises(BadRule):
        phrase_regex(phrase)


@settings(max_examples=150)
@given(st.text(max_size=60))
def test_a_phrase_is_literal(phrase: str) -> None:
    """Nothing in a phrase is read as a regular expression but its holes."""
    try:
        regex = phrase_regex(phrase)
    except BadRule:
        return
    if not set("*{") & set(phrase):
        assert regex.search(f"before {' '.join(phrase.split())} after")
        assert regex.groups == 0


@pytest.mark.parametrize(
    "change",
    [
        {"rules": [{"means": "joy", "says": "input", "source": "x"}]},
        {"rules": [{"means": "input", "says": "input .. joy", "source": "x"}]},
        {"figures": [{"says": "{joy}", "source": "x"}]},
        {"fields": [{"name": "a", "means": "joy", "source": "x"}]},
        {"codes": [{"code": "a", "means": "joy", "source": "x"}]},
        {"words": {"joy": [["happy"]]}},
    ],
)
def test_data_that_cannot_be_read(change: dict[str, Any]) -> None:
    """What no reader knows is named."""
    with pytest.raises(BadRule, match="joy"):
        read_rules({**DATA, **change})


@pytest.mark.parametrize("code", ["context_length_exceeded", "ContextLengthExceeded", "CONTEXT-LENGTH-EXCEEDED-ERROR"])
def test_codes_are_the_same_in_any_writing(code: str) -> None:
    """Case, separators and the word "error" make no other code."""
    assert code_name(code) == "contextlengthexceeded"


def test_each_packaged_pattern_compiles() -> None:
    """No start of the proxy does that: a pattern is compiled at its first use."""
    rules = read_rules(DATA)
    patterns = [pattern.regex for pattern in (*(rule.pattern for rule in rules.rules), *rules.figures, *rules.phrases)]
    assert len(patterns) > 70
    assert [pattern.pattern for pattern in patterns if pattern.search("\0")] == []


def test_patterns_have_bounded_gaps_only() -> None:
    """No pattern repeats without a bound: their time is linear in the length of the text."""
    rules = read_rules(DATA)
    for pattern in (*(rule.pattern for rule in rules.rules), *rules.figures):
        assert not re.search(r"[*+](?![^\[]*\])", pattern.regex.pattern.replace("\\+", "")), pattern.regex.pattern
