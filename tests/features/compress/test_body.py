"""The bodies of requests for views: their API, their options, and what of them is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.report import Report
from proxy.features.compress.body import FIGURES, UnusableBody, answer_body, read_body

USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"messages": [USER]}, "chat"),
        ({"messages": [USER], "system": "Be terse."}, "messages"),
        ({"messages": [USER], "tools": [{"name": "t", "input_schema": {}}]}, "messages"),
        ({"messages": [USER], "api": "messages"}, "messages"),
        ({"input": [USER]}, "responses"),
    ],
)
def test_the_api_is_that_of_the_items(body: dict[str, Any], api: str) -> None:
    """The members say which API a body is of, unless the caller does; what is ours is no part of the view."""
    wanted = read_body(json.dumps({"model": "m", "window": 9, **body}).encode())
    assert (wanted.api, wanted.window) == (api, 9)
    assert not {"api", "window"} & json.loads(wanted.body).keys()


def test_members_stay_as_their_bytes_are() -> None:
    """Figures, escapes and spaces of what is not ours are not written anew."""
    body = b'{"messages": [{"role":"user",  "content":"\\u00e9"}], "x": 1.10, "tokens_after": 3, "target": 0.25}'
    wanted = read_body(body)
    assert wanted.body == b'{"messages":[{"role":"user",  "content":"\\u00e9"}],"x":1.10}'
    assert (wanted.share, wanted.target) == (0.25, None)


@pytest.mark.parametrize(
    ("body", "api", "words"),
    [
        (b"{", "chat", "no JSON object"),
        (b"[1]", "chat", "no JSON object"),
        (b'{"model": "m"}', "chat", "Send messages"),
        (b'{"messages": "hi"}', "chat", "Send messages"),
        (b'{"messages": [], "api": "soap"}', "chat", "Send messages"),
        (b'{"messages": [], "api": "responses"}', "responses", "has input"),
        (b'{"messages": [], "system": "s", "target": 1.5}', "messages", "target"),
        (b'{"messages": [], "target": 0}', "chat", "target"),
        (b'{"messages": [], "target": true}', "chat", "target"),
        (b'{"input": [], "window": "9"}', "responses", "window"),
        (b'{"input": [], "window": 1e12}', "responses", "window"),
        (b'{"input": [], "window": 1.5}', "responses", "window"),
        (b'{"input": [], "keep_items": 1}', "responses", "keep_items"),
    ],
)
def test_what_cannot_be_read_is_refused_in_the_shape_of_its_api(body: bytes, api: str, words: str) -> None:
    """The sentence names the member; the error knows the API of the body as far as that could be seen."""
    with pytest.raises(UnusableBody, match=words) as refused:
        read_body(body)
    assert refused.value.api == api


@pytest.mark.parametrize("name", ["model", "messages", "mod\\u0065l"])
def test_an_important_member_twice_is_refused(name: str) -> None:
    """One rule for every route: parsers disagree on which one counts."""
    twice = b'{"model": "a", "messages": [], "%s": "b"}' % name.encode()
    with pytest.raises(UnusableBody, match="more than once"):
        read_body(twice)


def test_the_answer_has_the_view_and_the_figures() -> None:
    """Figures have the names that gateways read, and the ratio of a request without tokens is 1."""
    report = Report("r", "compress", outcome="compacted", stages=("fold",), tokens_before=100, tokens_after=25)
    answer = json.loads(answer_body(b'{"messages": [], "x": 1}', report))
    assert answer.keys() == {"messages", "x", *FIGURES}
    assert (answer["tokens_saved"], answer["compression_ratio"], answer["transforms_applied"]) == (75, 0.25, ["fold"])
    assert json.loads(answer_body(b"{}", Report("r", "compress")))["compression_ratio"] == 1.0
