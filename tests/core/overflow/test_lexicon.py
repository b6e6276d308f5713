"""How a text becomes a row of notions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.overflow.lexicon import LONGEST_TEXT, Lexicon, Row
from proxy.settings import packaged_overflow_rules

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
        ("文章内容过长，您发送的内容过长", "fJE,_JE", []),
        ("ノートの内容が長すぎます, コメント内容が長すぎます", "JE,fJE", []),
        ("备注的长度超过", "fLO", []),
        ("sequence length 9120, sequence_length 8192", "ILN,WN", [9_120, 8_192]),
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
        ("9810 token su 8192, 12 880 tokens", "NK/N,NK", [9_810, 8_192, 12_880]),
        ("the limit of the job, this worker's context", "_fM___,_fC", []),
        ("failed to index history, unable to process history", "__oI,f__I", []),
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
