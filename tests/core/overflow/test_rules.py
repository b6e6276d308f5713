"""How sentences are read: words as notions, codes, phrases and patterns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.rules import (
    LONGEST_PHRASE,
    LONGEST_TEXT,
    MEANINGS,
    ROLES,
    BadRule,
    Lexicon,
    Row,
    code_name,
    phrase_regex,
    read_rules,
)
from proxy.settings import packaged_overflow_rules
from tests.support.overflow_rules import without_sources

WORDS = {
    phrase: [notion] for notion, lists in packaged_overflow_rules()["words"].items() for row in lists for phrase in row
}
LEXICON = Lexicon(WORDS.items(), ["(2013)"])


def read(text: str) -> tuple[str, list[int]]:
    row = LEXICON.read(text)
    return row.notions, list(row.figures.values())


@pytest.mark.parametrize(
    ("text", "notions", "figures"),
    [
        ("prompt is too long: 9,000 tokens > 8192 maximum", "I_EN" + "K>NM", [9000, 8192]),
        ("context_length_exceeded", "WO", []),
        ("ContextLengthExceeded", "WO", []),
        ("max_new_tokens must be <= 192.", "X__UN.", [192]),
        ("Range should be [1, 8192]", "U__[N", [8192]),
        ("输入超过最大长度8192", "IOwN", [8192]),
        ("최대 8192토큰", "MNK", [8192]),
        ("gpt-4o-2024-08-06 and llama-3-8b", "__,__", []),
        ("5.5 MB", "nB", []),
        ("10485760 bytes", "nB", []),
        ("90% of it", "n__", []),
        ("128k tokens, 1m tokens", "NK,NK", [128_000, 1_000_000]),
        ("131.072 tokens", "NK", [131_072]),
        ("exceeds limit (2013)", "OM", []),
        ("too large: 4096.This model's", "EN._" + "_", [4096]),
        ("a => b ≥ c", "__" + "_>_", []),
        ("max_tokens is -411, 40960 -900", "X_z,N-N", [40_960, 900]),
        ("9003/8192 tokens", "N/NK", [9_003, 8_192]),
        ("9003 of 8192 tokens, 5 of them", "N/NK,N__", [9_003, 8_192, 5]),
        ("max-model-len 4096", "WN", [4_096]),
        ("ข้อความยาวเกินไป: 9003", "IEN", [9_003]),
        ("संदेश बहुत लंबा", "IE", []),
        ("İSTEM ÇOK UZUN", "JE", []),
        ("(request id: 20261127101) 8192 tokens", "_NK", [8_192]),
        ("extra_body.top_k 4096", "f_N", [4_096]),
        ("34120 tokenia by the tokenizer", "NKb__", [34_120]),
        ("order history is too long", "fI_E", []),
        ("PjlSequenceTooLong", "fIE", []),
        ("the order: history is too long", "__I_E", []),
        ("cannot process input, compiled input, image prompt", "__I,_I,FI", []),
        ("while one two three four five six seven eight nine ten eleven order history", ",_ffffffffI", []),
    ],
)
def test_texts(text: str, notions: str, figures: list[int]) -> None:
    """Words, codes, punctuation and figures become what they stand for, in several languages."""
    assert read(text) == (notions, figures)


def test_the_longest_phrase_holds() -> None:
    """A phrase is taken before the words it is made of."""
    assert Lexicon([("max length", ["window"]), ("max", ["most"])]).read("max length").notions == "W"
    assert Lexicon([("max*", ["most"]), ("max", ["window"])]).read("max").notions in "WM"


def test_an_unknown_notion() -> None:
    """A word that stands for nothing known is refused."""
    with pytest.raises(KeyError, match="joy"):
        Lexicon([("happy", ["joy"])])


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    """Text far behind the beginning changes nothing."""
    begun = "x " * (LONGEST_TEXT // 2)
    assert LEXICON.read(begun + "prompt is too long") == LEXICON.read(begun)


@settings(max_examples=200)
@given(st.text(max_size=200))
def test_any_text_is_read(text: str) -> None:
    """Figures stand where the row says so, and nowhere else."""
    row = LEXICON.read(text)
    assert isinstance(row, Row)
    assert all(row.notions[at] == "N" for at in row.figures)
    assert row.notions.count("N") == len(row.figures)


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
