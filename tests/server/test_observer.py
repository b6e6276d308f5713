"""What watches an answer: usage, late overflows, the usage that stays hidden; and that it never costs the answer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis.usage import UsageTap
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import NO_USAGE, Usage
from proxy.engine.include_usage import UsageHider
from proxy.server.observer import ReplyObserver
from tests.support.engine_fixtures import classifier

WORD = b'data: {"choices":[{"index":0,"delta":{"content":"Hello"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
LATE = b'data: {"error":{"message":"prompt is too long","code":"context_length_exceeded"}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = WORD + USAGE + WORD + LATE + DONE


def chunks(points: list[int]) -> list[bytes]:
    """The stream, cut at *points*."""
    edges = [0, *sorted(point % len(STREAM) for point in points), len(STREAM)]
    return [STREAM[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 1000), max_size=10))
def test_it_notes_what_passes_and_keeps_what_was_not_asked_for(points: list[int]) -> None:
    """However the stream is cut, the client gets all but the usage, which is noted, as is a late overflow."""
    faults: list[Exception] = []
    ending = LateOverflowDetector(classifier())
    observer = ReplyObserver("", UsageHider(), ending, faults.append)
    passed = b"".join([*map(observer.feed, chunks(points)), observer.rest()])
    assert passed == STREAM.replace(USAGE, b"")
    assert observer.usage == Usage(7, 2)
    assert ending.overflow is not None
    assert faults == []


@pytest.mark.parametrize("part", [UsageTap, UsageHider, LateOverflowDetector])
@given(points=st.lists(st.integers(0, 1000), max_size=10), good=st.integers(0, 10))
def test_a_part_that_fails_is_dropped_and_reported_once(part: type, points: list[int], good: int) -> None:
    """Wherever one part fails, every byte goes on in order, and there is one report."""
    faults: list[Exception] = []
    observer = ReplyObserver("", UsageHider(), LateOverflowDetector(classifier()), faults.append)
    passed: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        for at, chunk in enumerate([*chunks(points), b""]):
            if at == good:
                patch.setattr(part, "feed", lambda *_: 1 // 0)
            passed.append(observer.feed(chunk))
    passed.append(observer.rest())
    failed = good <= len(chunks(points))
    assert len(faults) == failed
    assert b"".join(passed).replace(USAGE, b"") == STREAM.replace(USAGE, b"")
    assert not failed or observer.usage == NO_USAGE


def test_a_reader_of_usage_that_cannot_be_made_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noted, everything passes."""
    monkeypatch.setattr(UsageTap, "__init__", lambda *_: 1 // 0)
    faults: list[Exception] = []
    observer = ReplyObserver("", None, None, faults.append)
    assert observer.feed(STREAM) + observer.rest() == STREAM
    assert (observer.usage, len(faults)) == (NO_USAGE, 1)
