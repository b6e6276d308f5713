"""Ranking of names: by worth for each token, exactly, with few of them counted; none that is shown comes again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.compaction.name_ranking import SMOOTH, Shown, Sizes, best_by_length, fewest_tokens, ranked
from proxy.tokenizers import VOCABULARIES
from tests.support.engine_fixtures import count_tokens, tokenizers

NAMES = st.text(st.sampled_from("aZß中é09_-./:,%$'\\ @~") | st.characters(), min_size=1, max_size=30)
WORTHS = st.dictionaries(st.text("aZ09_/.", min_size=1, max_size=12), st.sampled_from([0.5, 1.5, 2.0, 3.3]))
PATH = "src/cache/evict_rows.py"


@pytest.mark.parametrize("encoding", sorted(VOCABULARIES))
@given(text=NAMES)
def test_no_name_takes_fewer_tokens_than_it_is_expected_to_take(encoding: str, text: str) -> None:
    """Names are counted in the order of the fewest tokens that they can take: a higher guess would hide a good one."""
    assert fewest_tokens([text]) <= [tokenizers().count(encoding, f"{text}, ")]


@given(st.lists(NAMES, max_size=8))
def test_a_name_is_expected_to_take_as_many_tokens_beside_others(names: list[str]) -> None:
    """Names are looked at together: no other one changes what a name is expected to take."""
    assert fewest_tokens(names) == [size for name in names for size in fewest_tokens([name])]


@pytest.mark.parametrize(
    ("name", "fewest"), [("412", 3), ("4123", 4), ("src/rows_12.py", 6), ("a1b2", 6), ("don't", 3), ("“don't”", 2)]
)
def test_letters_and_digits_take_tokens_of_their_own(name: str, fewest: int) -> None:
    """Each run of letters takes at least one, each three digits one, comma and space one each."""
    assert fewest_tokens([name]) == [fewest]


@given(WORTHS)
def test_names_come_by_their_worth_for_each_token(worths: dict[str, float]) -> None:
    """The order is that of all sizes counted exactly; equal names come by their letters."""
    order = sorted(worths, key=lambda name: (-worths[name] / (count_tokens(f"{name}, ") + SMOOTH), name))
    assert list(ranked(worths, Sizes(count_tokens))) == order


@given(
    st.dictionaries(st.text("aZ09_/.", min_size=1, max_size=12), st.sampled_from([0.5, 1.5, 3.3])), st.integers(0, 9)
)
def test_the_best_by_length_are_as_many_as_there_may_be(worths: dict[str, float], most: int) -> None:
    """None that is left out is worth more for its length than one that stays, and of equal ones the first stay."""
    best = best_by_length(worths, most)
    order = sorted(worths, key=lambda name: (-worths[name] / (len(name) / 4 + 3.0), name))
    assert set(best) == set(order[:most])
    assert all(worths[name] == worth for name, worth in best.items())


@pytest.mark.parametrize(
    "known", ["", "See src/cache/evict_rows.py, row 412.", "x " * 20_000 + "src/cache/evict_rows.py 412"]
)
@given(
    names=st.lists(st.sampled_from(["evict_rows.py", "src/cache/evict_rows.py", "412", "rows.py", "src/other/rows.py"]))
)
def test_no_name_is_shown_twice(known: str, names: list[str]) -> None:
    """A name is new unless the known text or a name that was shown holds it."""
    shown, before = Shown(known), [known]
    for name in names:
        assert shown.is_new(name) == (not any(name in text for text in before))
        before.append(name)
