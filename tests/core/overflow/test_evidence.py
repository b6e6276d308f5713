"""Which claims of overflow are believed, given what is known of the request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.overflow.evidence import ALIKE, LIKELY, TINY, Prior, agrees, contradicts, is_about_the_output, judged
from proxy.core.overflow.kinds import Overflow
from tests.support.engine_fixtures import classifier
from tests.support.overflow_claims import CIRCUMSTANCES, HALVES, OverflowClaim, claims

SENTENCE = Overflow("input", rule="a sentence")
FIGURES = Overflow("input", 8_192, 9_000, rule="figures")
CODE = Overflow("input", decisive=True, rule="a code")


def read(claim: OverflowClaim, circumstance: str) -> Overflow | None:
    """What is believed of *claim*, if something smaller would be sent for it."""
    found = classifier().answer(claim.status, (), claim.body.encode(), claim.prior(circumstance))
    return found if found is not None and found.too_long else None


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_look_alikes(half: str, circumstance: str) -> None:
    """Of 50 look-alikes at most two cost a retry, and fewer teach a window, whatever is known of it."""
    others = [claim for claim in claims() if claim.half == half and not claim.is_overflow]
    believed = {claim.body: found for claim in others if (found := read(claim, circumstance))}
    assert len(others) > 25
    assert len(believed) <= 0.04 * len(others), believed
    assert sum(found.sure and found.window is not None for found in believed.values()) <= 0.04 * len(others)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("circumstance", CIRCUMSTANCES[:3])
def test_overflows(half: str, circumstance: str) -> None:
    """Of overflows in other words 95 % are found, far below the window that is believed too, and no limit is wrong."""
    real = [claim for claim in claims() if claim.half == half and claim.is_overflow]
    found = {claim: read(claim, circumstance) for claim in real}
    assert len(real) > 20
    assert sum(one is not None for one in found.values()) >= 0.95 * len(real)
    wrong = {
        claim.body for claim, one in found.items() if one and one.window and one.window != (claim.limit or one.window)
    }
    assert wrong == set()


@pytest.mark.parametrize("half", HALVES)
def test_overflows_of_a_tiny_request(half: str) -> None:
    """At a twelfth of a stated window what has a code is still found; a sentence alone is not."""
    for claim in claims():
        if claim.half != half or not claim.is_overflow:
            continue
        alone = classifier().answer(claim.status, (), claim.body.encode())
        if alone is None or (not alone.decisive and alone.limit is None):
            assert read(claim, "stated 12 x") is None, claim.body
        elif alone.decisive:
            assert read(claim, "stated 12 x") is not None, claim.body


def test_a_sentence_is_held_against_the_pressure() -> None:
    """A sentence alone is not believed of a request that is tiny for a stated window; of a small one it is unsure."""
    tiny, small, likely = (int(share * 100_000) for share in (TINY / 2, TINY, LIKELY))
    assert judged(SENTENCE, Prior(tiny, window=100_000, stated=True)) is None
    assert judged(SENTENCE, Prior(tiny, window=100_000)) == replace(SENTENCE, sure=False)
    assert judged(SENTENCE, Prior(small, window=100_000, stated=True)) == replace(SENTENCE, sure=False)
    assert judged(SENTENCE, Prior(likely, window=100_000, stated=True)) is SENTENCE
    assert judged(SENTENCE, Prior(tiny)) is SENTENCE
    assert judged(SENTENCE, Prior(window=100_000, stated=True)) is SENTENCE
    assert judged(CODE, Prior(tiny, window=100_000, stated=True)) is CODE


def test_figures_are_held_against_our_count() -> None:
    """A prompt within a third of our count and a limit below it are about this request; other figures are not."""
    least = int(9_000 * (1 - ALIKE))
    for counted, expected in ((9_000, True), (least, True), (least - 1, False), (20_000, False)):
        assert agrees(FIGURES, Prior(counted)) is expected
    assert judged(FIGURES, Prior(9_000, window=1_000_000, stated=True)) is FIGURES
    assert judged(FIGURES, Prior(1_000, window=100_000)) is None
    assert contradicts(FIGURES, Prior(4_000))
    assert not contradicts(FIGURES, Prior(6_000))
    far = Overflow("input", 1_000, 90_000)
    assert contradicts(far, Prior(2_000, plain=True))
    assert not contradicts(far, Prior(9_000, plain=False))
    assert not agrees(FIGURES, Prior())
    assert not contradicts(FIGURES, Prior())


def test_a_limit_alone_agrees_if_we_count_more() -> None:
    """An error that states nothing but its limit is believed if our count, with the output if that counts, is above."""
    alone = Overflow("input", 8_192)
    assert agrees(alone, Prior(8_192))
    assert not agrees(alone, Prior(8_191))
    assert agrees(Overflow("input_plus_output", 8_192), Prior(8_000, 500))
    assert not agrees(Overflow("payload", None), Prior(8_000))
    assert not agrees(replace(alone, names_media=True), Prior(9_000))


def test_the_whole_that_was_requested() -> None:
    """A figure of prompt and output together is held against both."""
    whole = Overflow("input_plus_output", 8_192, requested=9_000)
    assert agrees(whole, Prior(4_900, 4_000))
    assert not agrees(whole, Prior(1_000, 400))


def test_the_output_figure_is_not_the_conversation() -> None:
    """A figure that is just the output asked for complains of the output, even behind a code, if our count fits."""
    claim = Overflow("input", 16_384, 32_000, decisive=True)
    prior = Prior(2_000, 32_000, window=100_000)
    assert is_about_the_output(claim, prior)
    assert judged(claim, prior) == Overflow("output_cap", 16_384, None, 32_000)
    assert not is_about_the_output(claim, Prior(15_000, 32_000))
    assert not is_about_the_output(claim, Prior(2_000))
    assert not is_about_the_output(Overflow("input", None, 32_000), prior)


def test_media_need_agreement() -> None:
    """A complaint that names an image or a file is believed near the window only, and never teaches by itself."""
    media = replace(SENTENCE, names_media=True)
    assert judged(media, Prior(10_000)) is None
    assert judged(media, Prior(10_000, window=100_000)) is None
    assert judged(media, Prior(80_000, window=100_000)) is None
    assert judged(media, Prior(90_000, window=100_000)) == replace(media, sure=False)
