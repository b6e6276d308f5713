"""The prompts that are sent, and conversations as data."""

from __future__ import annotations

import base64
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation import ItemText
from proxy.summaries.headings import SECTIONS
from proxy.summaries.prompts import (
    ARGUMENTS,
    MIDDLE,
    RESULT,
    RUN,
    head_and_tail,
    item_texts,
    load_prompts,
    most_words,
    neutralised,
    omit_data,
    quotation,
    split_transcript,
)
from proxy.summaries.verify import INSTRUCTIONS
from proxy.tokenizers import Tokenizers
from tests.support.engine_fixtures import count_tokens


def test_prompts_ask_for_what_is_verified() -> None:
    """Both instructions name every section that rules cannot write, and a number of words that follows the cap."""
    prompts = load_prompts()
    for text in (prompts.system("n0nce", 200), prompts.aligned(200)):
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [each for each in SECTIONS if each != INSTRUCTIONS]
        assert "At most 200 words" in text
        assert "$" not in text
    assert len(prompts.version) == 8
    assert prompts.version == load_prompts().version


RUSSIAN = "Прокси освобождал блокировку слишком рано, поэтому строки терялись каждую ночь. "
FINNISH = "Välityspalvelin vapautti lukituksen liian aikaisin, joten rivejä katosi joka yö. "
ARABIC = "كان الوكيل يحرر القفل في وقت مبكر جدا، لذلك كانت الصفوف تضيع كل ليلة. "


@pytest.mark.parametrize("said", [RUSSIAN, FINNISH, ARABIC])
@pytest.mark.slow
def test_a_language_whose_words_take_many_tokens_gets_fewer_words(said: str) -> None:
    """So many words as the prompt allows, in the conversation's own language, are within the cap."""
    count = Tokenizers().counter("cl100k_base")
    words = most_words([ItemText("user", said * 20)], 400, count)
    summary = " ".join((said * 20).split()[:words])
    assert 40 <= words < 200
    assert count(summary) <= 400


@pytest.mark.parametrize(
    "said", ["The lock is released too early; naïve callers lose rows. ", "锁释放得太早，所以每天晚上都会丢失行。"]
)
def test_english_and_scripts_without_spaces_get_half_a_word_per_token(said: str) -> None:
    """A few letters of other alphabets change nothing, and no words are counted where there are no spaces."""
    assert most_words([ItemText("user", said * 20), ItemText("tool", RUSSIAN * 99)], 400, count_tokens) == 200


def test_data_stands_between_lines_with_the_mark() -> None:
    """Transcript and previous summary are fenced by the mark, whatever they hold."""
    prompts = load_prompts()
    text = prompts.request("n0nce", "| ${nonce} $x", "## Pending\n- $y")
    assert "[begin of the conversation n0nce]\n| ${nonce} $x\n[end of the conversation n0nce]" in text
    assert "[begin of the summary so far n0nce]\n## Pending\n- $y\n[end of the summary so far n0nce]" in text
    assert "summary so far" not in prompts.request("n0nce", "| x", "")
    assert "n0nce" in prompts.system("n0nce", 200)


BLOB = base64.b64encode(random.Random(1).randbytes(3000)).decode()


@pytest.mark.parametrize(
    "text", [f"see data:image/png;base64,{BLOB} here", f"see {BLOB} here", "see " + "x,y;" * 6000 + " here"]
)
def test_encoded_data_is_left_out_with_a_word_about_it(text: str) -> None:
    """Data URLs, bare base64 and endless runs are replaced by their size and a digest."""
    slimmed = omit_data(text)
    assert slimmed.startswith("see [... data left out: about ")
    assert slimmed.endswith(" ...] here")
    assert len(slimmed) < 100


@pytest.mark.parametrize(
    "text", ["-" * 5000, "a" * 1300, "汉字" * 12_000, "word " * 9000, "data:image/png;base64,AAAA"]
)
def test_text_is_not_taken_for_data(text: str) -> None:
    """Rules of dashes, prose of any script and short data URLs stay."""
    assert omit_data(text) == text


def test_data_is_found_wherever_it_begins() -> None:
    """The shortest run that is data is left out at each place of a text; one a character shorter stays."""
    run = BLOB[:RUN]
    for before in range(0, RUN, 7):
        assert "data left out" in omit_data(f"{'-' * before} {run}\n")
        assert omit_data(f"{'-' * before} {run[:-1]}\n").endswith(f" {run[:-1]}\n")


def test_slimming_is_linear() -> None:
    """Runs just below the limit do not make the search start over inside each of them."""
    assert omit_data(("A1" * 599 + " ") * 2000).count("A1") == 599 * 2000


@pytest.mark.parametrize(
    "tag", ["<|im_start|>system", "</transcript>", "<system>", "[INST] x [/INST]", "<<SYS>>", "</ user>", "<tool_call>"]
)
def test_nothing_looks_like_a_role(tag: str) -> None:
    """Special tokens and role tags lose their brackets."""
    found = neutralised(f"before {tag} after")
    assert tag not in found
    assert not {"<|", "[INST", "<<SYS", "<system", "</transcript", "<tool"} & {
        found[i : i + n] for i in range(len(found)) for n in (2, 5, 7, 12)
    }


@given(st.text(max_size=400))
def test_every_line_stands_behind_a_bar(text: str) -> None:
    """No line of a quoted text can begin like a speaker or the end of the fence."""
    assert all(line.startswith("| ") for line in quotation(text, 200).split("\n")) or quotation(text, 200) == ""


def test_an_item_tells_who_spoke_what_was_called_and_what_came_with_it() -> None:
    """Calls, clipped results and media are named; system items are not part of what is summed up."""
    result = "begin " + "x y " * 4000 + "end"
    entries = [
        ItemText("system", "secret rules"),
        ItemText("user", "look\nat this", (), ("image_url",)),
        ItemText("assistant", "I look.", (("read_file", '{"path": "a.py"}'), ("write", "z " * 3000))),
        ItemText("tool", result),
    ]
    user, assistant, tool = item_texts(entries, 1.0)
    assert user == "user:\n| look\n| at this\n(image_url, not shown)"
    assert 'calls read_file:\n| {"path": "a.py"}' in assistant
    assert len(assistant) < ARGUMENTS + 200
    assert tool.startswith("tool result:\n| begin")
    assert tool.endswith("end")
    assert MIDDLE in tool
    assert len(tool) < RESULT + 200


def test_what_is_cut_is_cut_between_words() -> None:
    """A cut leaves no half of a name or figure, unless it is longer than any name."""
    names = [f"ledger_{at:05}" for at in range(2000)]
    (piece,) = item_texts([ItemText("tool", " ".join(names))], 1.0)
    (segment,), _ = split_transcript([ItemText("user", "\n".join(names[:500]))], 300, count_tokens, 1.0)
    for text in (piece, segment):
        assert MIDDLE in text
        words = text.replace(MIDDLE, "").replace("|", "").split()
        assert set(words) - {"tool", "result:", "user:"} <= set(names)
    assert sum(map(len, head_and_tail("x" * 900, 300))) == 600


@given(
    st.lists(st.builds(ItemText, st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=3000)), max_size=12)
)
def test_no_chunk_is_larger_than_its_limit(entries: list[ItemText]) -> None:
    """The transcript in runs: none above the limit, every item in one of them, in order."""
    found, tokens = split_transcript(entries, 300, count_tokens, 1.0)
    sizes = [*map(count_tokens, found)]
    assert all(size <= 300 for size in sizes)
    assert sum(sizes) <= tokens <= sum(sizes) + 4 * len(entries)
    speakers = [
        line for segment in found for line in segment.split("\n") if line in ("user:", "assistant:", "tool result:")
    ]
    names = {"user": "user:", "assistant": "assistant:", "tool": "tool result:"}
    assert speakers == [names[entry.role] for entry in entries]
