"""The source of a summary: what it has, and whose sentence a line repeats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.conversation import ItemText, Role
from proxy.summaries.source import Source

ENDS = (". ", "! \n", ";", "\n", " ", "  ", ":\t", "\n\n. ")


@pytest.mark.parametrize(
    ("token", "is_held"),
    [("ledger_7", True), ("LEDGER_7", True), ("ledger", False), ("7", False), ("src/a.py", True), ("a.py", True)],
)
def test_only_a_whole_name_is_held(token: str, is_held: bool) -> None:
    """A name is in the source in any case, but not as a part of a longer word or figure."""
    call = ("read_file", '{"path": "src\\/a.py"}')
    assert Source([ItemText("assistant", "Ledger_7 and LEDGER_7: ledger_7.", (call,))], 40).holds(token) is is_held


@given(
    st.lists(st.tuples(st.sampled_from(["go to the sea", "do not stay here", "a"]), st.sampled_from(ENDS)), max_size=8),
    st.sampled_from(["go to the sea", "do not stay here", "do stay here", "a", "sea do not stay"]),
    st.sampled_from(["user", "tool"]),
)
def test_no_speaker_depends_on_other_letters(said: list[tuple[str, str]], line: str, role: Role) -> None:
    """Sentences of ASCII text, which is split by a pattern of its own, end where those of any other text do."""
    text = "".join(words + end for words, end in said)
    plain, other = (Source((ItemText(role, each),), 400) for each in (text, text + "\né"))
    assert plain.speaker(line) == other.speaker(line)
