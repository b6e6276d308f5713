"""What a text is about, by the words that stand before and beside its subject."""

from __future__ import annotations

import json

import pytest

from proxy.core.overflow.evidence import Prior
from proxy.core.overflow.lexicon import Row
from proxy.core.overflow.subjects import complains_of_media, is_about_output, is_about_tokens, names_own_tokens
from tests.support.engine_fixtures import classifier

CLAIMS = [
    "{}history is too long",
    "{}history limit exceeded",
    "{}input exceeds the maximum",
    "{}token count exceeds the limit",
    "{}session is too large",
]


def row(text: str) -> Row:
    return classifier()._rules.lexicon.read(text)


def is_believed(message: str) -> bool:
    body = json.dumps({"error": {"message": message}}).encode()
    found = classifier().answer(400, (), body, Prior(3_000))
    return found is not None and found.too_long


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("before", ["", "the ", "your ", "whole ", "supplied ", "ValueError: ", "Order 4: "])
def test_a_subject_of_its_own(claim: str, before: str) -> None:
    """What stands alone, or behind words that leave it what it is, is a request's."""
    assert is_believed(claim.format(before))


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("before", ["order ", "the layout ", "browser_", "your wallet "])
def test_a_subject_of_something_else(claim: str, before: str) -> None:
    """A word that nobody knows makes what it qualifies something else's."""
    assert not is_believed(claim.format(before))


@pytest.mark.parametrize(
    "message",
    [
        "Unread messages exceed the buffer limit",
        "memory limit exceeded: 9120 MB > 8192 MB",
        "Secret is too long",
        "the repository exceeds token limits",
        "bufio.Scanner: token too long",
        "the published prefix does not fit in the KV cache",
        "operation token length exceeds allowed limit (5210/4096)",
        "Conversation limit reached (20)",
        "empty response, token limit exceeded",
        "Metadata size is 45088 bytes, which exceeds the limit of 40960 bytes",
    ],
)
def test_limits_of_something_else(message: str) -> None:
    """Whose limit it is, how small it is, and what has letters or memory, tell a look-alike."""
    assert not is_believed(message)


@pytest.mark.parametrize(
    ("message", "believed"),
    [
        ("备注超过最大长度", False),
        ("网址长度不能超过1000个字符", False),
        ("消息长度不能超过4000个字符", True),
        ("模型最大长度超限", True),
        ("请求的token数量超出限制", True),
        ("公開対象の項目が1200件あり、上限の1000件を超えています。", False),
        ("入力が1200トークンあり、上限の1000を超えています。", True),
        ("Arquivo excede o limite de 10 MB.", False),
        ("El texto supera el límite de 4000 caracteres.", True),
        ("configured context window exceeds model context limit", False),
        ("Input exceeds the configured context window", True),
        ("The number of requested tokens exceeds the allowed tokens per customer", False),
        ("The number of requested tokens exceeds the allowed tokens per request", True),
        ("WebSocket payload exceeds 1 MiB", False),
        ("Request payload exceeds 1 MiB", True),
        ("JSON body is too large", True),
        ("Custom text is too long for the selected password length", False),
        ("messages too long (max 100)", False),
        ("messages too long (max 4000)", True),
        ("messages too long (max 100 tokens)", True),
    ],
)
def test_whose_size_and_limit(message: str, believed: bool) -> None:
    """Sizes, limits and numbers are a request's if something of one is named, in languages without spaces, too."""
    assert is_believed(message) is believed


@pytest.mark.parametrize("message", ["The roleplay prompt is too long", "farm conversation exceeds the limit"])
def test_a_prompt_is_always_one(message: str) -> None:
    """Only models have prompts and conversations."""
    assert is_believed(message)


@pytest.mark.parametrize(
    ("message", "believed"),
    [
        ("Die Unterhaltung hat 9120 Token, das Modell nimmt 8192.", True),
        ("Die Unterhaltung hat 9216 Token, das Modell nimmt 8192.", False),
        ("Die Unterhaltung hat 9120 Token, das Modell nimmt 8111.", False),
        ("Der Vektor hat 9120 Zahlen, das Modell nimmt 8192.", False),
    ],
)
def test_a_count_and_a_limit(message: str, believed: bool) -> None:
    """Of two figures in words that nobody knows, a limit is a round number and a count is none."""
    assert is_believed(message) is believed


@pytest.mark.parametrize(
    ("errors", "believed"),
    [
        ({"name": "Input is too long"}, False),
        ({"name": ["Input is too long"]}, False),
        ({"messages": ["Input is too long"]}, True),
        ({"message": "Input is too long"}, True),
        ([{"field": "summary", "message": "Input is too long"}], False),
        ([{"path": "/v1/chat/completions", "message": "Input is too long"}], True),
    ],
)
def test_the_member_at_fault(errors: object, believed: bool) -> None:
    """An error that names a member which is not the conversation is about that member."""
    found = classifier().answer(400, (), json.dumps({"errors": errors}).encode(), Prior(3_000))
    assert (found is not None) is believed


def test_what_rows_are_about() -> None:
    """Output is what the model says; tokens are a request's unless they are named otherwise."""
    assert is_about_output(row("the answer is cut, limit reached"))
    assert not is_about_output(row("no room for an answer behind this prompt"))
    assert names_own_tokens(row("too many tokens"))
    assert not names_own_tokens(row("too many lexer tokens"))
    assert is_about_tokens(row("9120 tokens"), beside_a_rate=False)
    assert not is_about_tokens(row("9120 tokens"), beside_a_rate=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image is too large", True),
        ("the file content (33120 tokens) exceeds the token limit (8000 tokens)", True),
        ("Payload too large. Please reduce the size of your attachments.", True),
        ("Please reduce the size of the files or start a new chat; this conversation is too long", False),
        ("image does not fit the context window", False),
    ],
)
def test_complaints_of_media(text: str, expected: bool) -> None:
    """What is too large is a file, or nothing but a file is to be made smaller."""
    assert complains_of_media(row(text)) is expected
