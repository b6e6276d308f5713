"""Paths of Gemini's API: which are managed, the model in them, and the keys in their queries."""

from __future__ import annotations

import json

import pytest

from proxy.core.apis.gemini_path import (
    count_body,
    generation_path,
    is_below_root,
    model_in_resource,
    names_model,
    path_for,
    read_path,
    renamed_body,
    split_keys,
)

VERTEX = "/v1/projects/p-1/locations/us-east1/publishers/google/models/"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/v1beta/models/gemini-2.5:generateContent", ("/v1beta/models/", "gemini-2.5", "generateContent")),
        ("/v1/models/m:countTokens", ("/v1/models/", "m", "countTokens")),
        ("/v1beta/models/vendor/m@1:generateContent", ("/v1beta/models/", "vendor/m@1", "generateContent")),
        (f"{VERTEX}m:streamGenerateContent", (VERTEX, "m", "streamGenerateContent")),
        ("/v1beta/models/m:embedContent", ("/v1beta/models/", "m", "embedContent")),
        ("/v1beta/models/m", ("/v1beta/models/", "m", "")),
        ("/v1beta/models/m/operations", ("/v1beta/models/", "m", "")),
        ("/v1beta/models/m/operations/x-1", ("/v1beta/models/", "m", "")),
        ("/v1beta/models/..", None),
        ("/v1beta/models", None),
        ("/v1beta/models/m:generateContent/", None),
        ("/v1beta/models/../files/x:generateContent", None),
        ("/v1beta/models/a/../b:generateContent", None),
        ("/v1beta/models/a%2fb:generateContent", None),
        ("/v1beta/models/:generateContent", None),
        ("/models/m:generateContent", None),
    ],
)
def test_a_path_names_a_version_a_model_and_perhaps_a_method(path: str, parts: tuple[str, str, str] | None) -> None:
    """A path names a version, a model of plain names and perhaps a method, and nothing climbs in it."""
    read = read_path(path)
    assert (read and read[:3]) == parts
    if read is not None:
        assert read.prefix + read.model + read.rest == path


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1beta/models/m:embedContent", True),
        ("GET", "/v1beta/models/m", True),
        ("POST", "/v1/models/m:embedContent", True),
        ("GET", "/v1/models/m", False),
        ("DELETE", "/v1/models/ft:gpt-4o", False),
        ("POST", f"{VERTEX}m:predict", True),
        ("GET", "/v1beta/files/x", False),
    ],
)
def test_version_1_of_the_api_is_shared_with_openai(method: str, path: str, expected: bool) -> None:
    """Below it OpenAI's models are read and deleted, and their names may have colons."""
    assert names_model(path, method) is expected


def test_a_body_gets_the_models_name() -> None:
    """Every member that names the resource, and no text that quotes one."""
    quote = '"text":"\\"model\\": \\"models/a\\""'
    body = f'{{"model": "models/a","requests":[{{"model":"models/a",{quote}}},{{"model":"models/ab"}}]}}'.encode()
    changed = json.loads(renamed_body(body, "a", 'b"'))
    assert changed["model"] == changed["requests"][0]["model"] == 'models/b"'
    assert changed["requests"][0]["text"] == '"model": "models/a"'
    assert changed["requests"][1]["model"] == "models/ab"
    vertex = b'{"model":"projects/p-1/locations/us/publishers/google/models/a"}'
    assert renamed_body(vertex, "a", "b") == vertex.replace(b"/a", b"/b")
    assert [model_in_resource(name) for name in ("models/a", "a", "x/models/a")] == ["a", "a", "a"]


def test_another_model_is_put_into_the_path() -> None:
    """Root, method and query stay as they are; what no path can hold is escaped; other paths stay."""
    assert path_for("/v1beta/models/a:streamGenerateContent?alt=sse&x=%20", "b") == (
        "/v1beta/models/b:streamGenerateContent?alt=sse&x=%20"
    )
    assert path_for(f"{VERTEX}a:countTokens", "vendor/b c?") == f"{VERTEX}vendor/b%20c%3F:countTokens"
    assert path_for("/v1beta/models/a/operations/x?y", "b") == "/v1beta/models/b/operations/x?y"
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
    below = ("/v1beta/models", "/v1alpha/x", "/upload/v1beta/files", "/v1beta1/publishers/x")
    live = "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
    assert all(map(is_below_root, (*below, "/v1/projects/p/locations/l/cachedContents", live)))
    others = ("/v1/models", "/v1beta", "/x/v1beta/models", "/v2beta/x", "/v1/organization/projects", "/ws/x")
    assert not any(map(is_below_root, others))


def test_more_than_contents_is_wrapped_for_a_count() -> None:
    """Contents alone are what the route takes; all else stands in a request of its own, which names the model."""
    assert count_body(b'{"contents": []}', "m") == b'{"contents": []}'
    assert count_body(b'{"generateContentRequest":{}}', "m") == b'{"generateContentRequest":{}}'
    wrapped = json.loads(count_body(b'{"contents":[], "tools":[1]}', "m"))
    assert wrapped == {"generateContentRequest": {"model": "models/m", "contents": [], "tools": [1]}}
    named = b'{"model":"models/x","contents":[]}'
    assert count_body(named, "m") == b'{"generateContentRequest":' + named + b"}"
