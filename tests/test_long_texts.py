"""What is left of a long text that is counted in parts; ``test_tokenizers.py`` compares the counts with tiktoken's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.long_texts import CHUNK, RUN, pieces, shortened


@given(
    st.lists(st.tuples(st.sampled_from("ab \n的"), st.integers(1, 4 * RUN)), max_size=5),
    st.text(max_size=20),
)
def test_what_is_cut_is_known(runs: list[tuple[str, int]], end: str) -> None:
    """The removed and the remaining characters are those of the text."""
    text = "".join(letter * length for letter, length in runs) + end
    left, cut = shortened(text)
    for letter in set(text):
        assert text.count(letter) == left.count(letter) + RUN * cut.get(letter, 0)


@given(st.lists(st.tuples(st.sampled_from(["a", "b ", " \n", "的"]), st.integers(1, CHUNK)), max_size=4))
def test_pieces_are_the_text(parts: list[tuple[str, int]]) -> None:
    """No piece is longer than a count may take, and joined they are the text."""
    text = "".join([letters * number for letters, number in parts])
    parted = list(pieces(text))
    assert "".join(parted) == text
    assert max(map(len, parted)) <= CHUNK
