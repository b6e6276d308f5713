"""Paths of Gemini's API: which are managed, the model in them, and the keys in their queries."""

from __future__ import annotations

import json

import pytest

from proxy.core.apis.gemini_path import count_body, generation_path, is_below_root, path_for, read_path, split_keys

VERTEX = "/v1/projects/p-1/locations/us-east1/publishers/google/models/"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/v1beta/models/gemini-2.5-pro:generateContent", ("/v1beta/models/", "gemini-2.5-pro", "generateContent")),
        ("/v1/models/m:countTokens", ("/v1/models/", "m", "countTokens")),
        ("/v1beta/models/vendor/m@1:generateContent", ("/v1beta/models/", "vendor/m@1", "generateContent")),
        (f"{VERTEX}m:streamGenerateContent", (VERTEX, "m", "streamGenerateContent")),
        ("/v1beta/models/m:embedContent", None),
        ("/v1beta/models/m", None),
        ("/v1beta/models/m:generateContent/", None),
        ("/v1beta/models/../files/x:generateContent", None),
        ("/v1beta/models/a/../b:generateContent", None),
        ("/v1beta/models/a%2fb:generateContent", None),
        ("/v1beta/models/:generateContent", None),
        ("/models/m:generateContent", None),
    ],
)
def test_managed_paths(path: str, parts: tuple[str, str, str] | None) -> None:
    """A managed path names a version, a model of plain names and one of three methods, and nothing climbs in it."""
    assert read_path(path) == parts


def test_another_model_is_put_into_the_path() -> None:
    """Root, method and query stay as they are; what no path can hold is escaped; other paths stay."""
    assert path_for("/v1beta/models/a:streamGenerateContent?alt=sse&x=%20", "b") == (
        "/v1beta/models/b:streamGenerateContent?alt=sse&x=%20"
    )
    assert path_for(f"{VERTEX}a:countTokens", "vendor/b c?") == f"{VERTEX}vendor/b%20c%3F:countTokens"
    assert path_for("/v1/chat/completions?a", "b") == "/v1/chat/completions?a"


def test_a_summary_is_a_whole_answer_below_the_same_root() -> None:
    """Whatever the client asked for, and also if it asked elsewhere."""
    assert generation_path(f"{VERTEX}a:streamGenerateContent?alt=sse", "b") == f"{VERTEX}b:generateContent"
    assert generation_path("", "b") == "/v1beta/models/b:generateContent"


@pytest.mark.parametrize(
    ("path_qs", "rest", "keys"),
    [
        ("/p?key=a%2Fb", "/p", ["a/b"]),
        ("/p?alt=sse&key=a&x=%20", "/p?alt=sse&x=%20", ["a"]),
        ("/p?k%65y=a&key=b", "/p", ["a", "b"]),
        ("/p?monkey=a&keys=b&key", "/p?monkey=a&keys=b", [""]),
        ("/p?alt=sse", "/p?alt=sse", []),
    ],
)
def test_keys_leave_the_query(path_qs: str, rest: str, keys: list[str]) -> None:
    """Every spelling of the parameter that a server decodes; the other parameters keep their bytes."""
    assert split_keys(path_qs) == (rest, keys)


def test_roots_of_this_api_alone() -> None:
    """Its beta versions, also of uploads; version 1 is OpenAI's and Anthropic's, too."""
    assert all(map(is_below_root, ("/v1beta/models", "/v1alpha/x", "/upload/v1beta/files", "/v1beta1/publishers/x")))
    assert not any(map(is_below_root, ("/v1/models", "/v1beta", "/x/v1beta/models", "/v2beta/x")))


def test_more_than_contents_is_wrapped_for_a_count() -> None:
    """Contents alone are what the route takes; all else stands in a request of its own, which names the model."""
    assert count_body(b'{"contents": []}', "m") == b'{"contents": []}'
    assert count_body(b'{"generateContentRequest":{}}', "m") == b'{"generateContentRequest":{}}'
    wrapped = json.loads(count_body(b'{"contents":[], "tools":[1]}', "m"))
    assert wrapped == {"generateContentRequest": {"model": "models/m", "contents": [], "tools": [1]}}
    named = b'{"model":"models/x","contents":[]}'
    assert count_body(named, "m") == b'{"generateContentRequest":' + named + b"}"
