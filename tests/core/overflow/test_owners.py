"""Who has what an error says is too big."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from proxy.core.overflow.evidence import Prior
from proxy.core.overflow.owners import has_owner_behind, is_failed_operation, is_in_another_thing, qualifies
from tests.support.engine_fixtures import classifier


def is_believed(message: str) -> bool:
    body = json.dumps({"error": {"message": message}}).encode()
    found = classifier().answer(400, (), body, Prior(3_000))
    return found is not None and found.too_long


@pytest.mark.parametrize(
    ("message", "believed"),
    [
        ("The token limit of the job is exceeded", False),
        ("The token limit of the model is exceeded", True),
        ("The token limit for this smaller model is exceeded", True),
        ("Input tokens exceed the limit of Granite", True),
        ("Input exceeds this worker's limit", False),
        ("Input exceeds this model's limit", True),
        ("Input exceeds Granite's limit", True),
        ("query and document: 9120 tokens, above the reranker's context of 8192", False),
        ("Input is too long for this device", False),
        ("Input is too long for the selected model", True),
        ("Input is too long for granite", True),
        ("Prompt is too long for our servers", True),
        ("El texto es demasiado largo para la tabla", False),
        ("El texto es demasiado largo para el modelo", True),
        ("La conversación es demasiado larga para la IA", True),
        ("Too many tokens in line", False),
        ("Too many tokens in the transaction", False),
        ("Too many tokens in the request", True),
        ("Too many tokens in total", True),
        ("알림 메시지가 너무 깁니다", False),
        ("현재 메시지가 너무 깁니다", True),
        ("보낸 메시지가 너무 깁니다", True),
        ("입력이 너무 깁니다 (500자 이내)", False),
        ("입력이 너무 깁니다 (5000자 이내)", True),
        ("系统备注超出长度限制", False),
        ("模型的输入超出长度限制", True),
    ],
)
def test_who_has_what_is_too_big(message: str, believed: bool) -> None:
    """An unknown owner counts behind what it has, too, and so does what something is too long for."""
    assert is_believed(message) is believed


@pytest.mark.parametrize(
    ("message", "believed"),
    [
        ("Failed to index history: 375703 tokens, at most 300000", False),
        ("Failed to process history: 375703 tokens, at most 300000", True),
        ("could not publish message: input is too long", False),
        ("Unable to complete: input is too long", True),
        ("failed to render the reply: the context window is exceeded", True),
        ("could not save the draft. Input is too long", True),
    ],
)
def test_what_could_not_be_done(message: str, believed: bool) -> None:
    """What is too long for an operation that is no model's work is no request, unless the window is named."""
    assert is_believed(message) is believed


def test_words_around_a_subject() -> None:
    """An owner is a noun that the lexicon has not, with an article behind what it has."""

    def is_known(words: Sequence[str], at: int) -> bool:
        return list(words[at : at + 1]) == ["request"]

    assert qualifies(["order", "history"], 0, is_known)
    assert not qualifies(["compiled", "history"], 0, is_known)
    assert qualifies(["the", "job's", "history"], 1, is_known)
    assert not qualifies(["granite's", "history"], 0, is_known)
    assert has_owner_behind(["limit", "of", "the", "job"], 1, is_known)
    assert not has_owner_behind(["limit", "of", "granite"], 1, is_known)
    assert not has_owner_behind(["limit", "of", "the", "request"], 1, is_known)
    assert is_in_another_thing(["tokens", "in", "line"], 1, is_known)
    assert not is_in_another_thing(["tokens", "in", "request"], 1, is_known)
    assert is_failed_operation(["failed", "to", "index"], 2)
    assert not is_failed_operation(["failed", "to", "process"], 2)
