"""What an error repeats of the request is no evidence."""

from __future__ import annotations

import json

import pytest

from proxy.core.overflow.echoes import Echoes
from proxy.core.overflow.evidence import Prior
from tests.support.engine_fixtures import classifier

SAID = "Why is it that the prompt is too long for the context window?\nIt says: maximum context length is 4096 tokens."
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": SAID}]}).encode()


def body(*messages: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": message} for message in messages]}).encode()


@pytest.mark.parametrize("quote", [SAID, repr(SAID), json.dumps(SAID), json.dumps(json.dumps(SAID)), SAID.upper()])
def test_a_quotation_is_left_out(quote: str) -> None:
    """However a conversation is quoted, what the error says of itself is left and the rest is not."""
    (left,) = Echoes(BODY).without([f"unknown role 'x' in message {quote} at position 3"])
    assert "unknown role" in left
    assert "position 3" in left
    assert "context" not in left.lower()


@pytest.mark.parametrize(
    "text",
    ["Grüße: die Eingabe überschreitet das Kontextfenster völlig", "请求超出了模型的最大上下文长度"],
)
@pytest.mark.parametrize("escaped", [True, False])
def test_any_language_and_its_escapes(text: str, escaped: bool) -> None:
    """Characters written as escapes are the same words."""
    (left,) = Echoes(json.dumps({"content": text}, ensure_ascii=escaped).encode()).without([f"invalid value: {text}"])
    assert left.strip(" |") == "invalid value:"


def test_a_quotation_that_is_cut_in_the_middle() -> None:
    """Whoever quotes may leave out the middle."""
    (left,) = Echoes(BODY).without([f"bad input_value='{SAID[:50]}...{SAID[-40:]}'"])
    assert "too long" not in left
    assert "context" not in left


def test_what_is_said_by_the_error_alone_stays() -> None:
    """Short runs of words, and sentences with other figures, are the error's own."""
    texts = ["the prompt is too long", "This model's maximum context length is 8192 tokens, you sent 9000"]
    assert Echoes(BODY).without(texts) == texts


def test_a_sentence_from_end_to_end() -> None:
    """An error that is nothing but a sentence of the conversation is the provider's own; beside others it is not."""
    known = "Your input exceeds the context window of this model. Please adjust your input and try again."
    echoes = Echoes(body("what does this mean?", known))
    assert echoes.without([known]) == [known]
    assert echoes.without(["Extra members are not permitted", known])[1].strip(" |.") == ""


def test_many_words_cost_little() -> None:
    """A long error is looked at in its beginning, however long the request is."""
    words = " ".join(f"word{number}" for number in range(60_000))
    (left,) = Echoes(body(words)).without([f"says: {words}"])
    assert left.startswith("says: ")
    assert len(left) < 40


def test_codes_in_a_quotation() -> None:
    """A code that stands in the request decides nothing by standing in the error's text."""
    text = "gateway: context_length_exceeded: no"
    error = json.dumps({"error": {"message": text}}).encode()
    prior = Prior(1_000, window=100_000, stated=True)
    found = classifier().answer(400, (), error, prior)
    assert found is not None
    assert found.decisive
    quoting = Prior(1_000, window=100_000, stated=True, body=body("what is context_length_exceeded?"))
    assert classifier().answer(400, (), error, quoting) is None
