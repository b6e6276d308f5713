"""The player of transcripts: what went otherwise than written fails, and says in which row."""

from __future__ import annotations

import pytest

from tests.stub import Rules
from tests.support.scripted_upstream import agent_body
from tests.support.transcript import Judge, play, rows_of

RIGHT = """
client   >> session
upstream << stub, session
upstream >> overflow
upstream << stub, smaller, view of session
upstream >> ok
client   << 200 ok
report   : outcome=compacted retries=1
replies  : closed, open
"""


async def played(text: str) -> None:
    await play(text, judge=Judge(Rules(window=5000)), session=agent_body(6200), other=b"{}")


async def test_what_went_as_written_passes() -> None:
    """The transcript that the others change by one row."""
    await played(RIGHT)


@pytest.mark.parametrize(
    ("row", "instead", "says"),
    [
        ("upstream << stub, session", "upstream << stub, other", "not so: other"),
        ("upstream << stub, session", "upstream << elsewhere, session", "it was sent to stub"),
        ("upstream << stub, smaller, view of session", "upstream << stub, session", "not so: session"),
        ("upstream << stub, smaller, view of session", "upstream << stub, same messages", "not so: same messages"),
        ("upstream << stub, smaller, view of session", "upstream << stub, tokens<=0.1", "not so: tokens"),
        ("upstream << stub, smaller, view of session", "upstream << stub, keyless", "not so: keyless"),
        ("upstream << stub, smaller, view of session", "upstream << stub, max_tokens=5", "not so: max_tokens"),
        ("upstream >> overflow", "upstream >> ok", "the strict judge says overflow"),
        ("upstream >> ok", "upstream >> ok\nupstream << stub\nupstream >> ok", "the engine never did this"),
        ("upstream << stub, smaller, view of session\nupstream >> ok\n", "", "does not have"),
        ("client   << 200 ok", "client   << 200 other", "200 other"),
        ("client   << 200 ok", "client   << reply 1", "reply 1"),
        ("client   << 200 ok", "client   << refused context_length_exceeded", "refused"),
        ("client   << 200 ok", "client   << raises InvalidRequest", "raises"),
        ("retries=1", "retries=2", "retries is 1"),
        ("outcome=compacted", "stages~nothing", "stages is"),
        ("closed, open", "open, open", "replies"),
        ("replies  : closed, open", "learned  : nothing", "learned"),
        ("replies  : closed, open", "records  : 77", "records"),
    ],
)
@pytest.mark.slow
async def test_what_went_otherwise_fails(row: str, instead: str, says: str) -> None:
    """One row that is not so, and the failure names it."""
    assert row in RIGHT
    with pytest.raises(AssertionError, match=says):
        await played(RIGHT.replace(row, instead))


async def test_an_error_that_no_row_expects_is_raised() -> None:
    """A transcript that says nothing of what the client gets does not hide that it got an exception."""
    with pytest.raises(AssertionError, match="messages"):
        await played("client >> other")


def test_a_line_that_is_no_row_is_a_mistake() -> None:
    """Nothing is skipped in silence."""
    with pytest.raises(ValueError, match="not a row"):
        rows_of("client >> a\nupstream -> b")
