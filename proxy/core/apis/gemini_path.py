"""The routes of Google's Gemini API, whose paths name the model and the method: ``/v1beta/models/MODEL:METHOD``.

https://ai.google.dev/api, and below a project and a publisher as on Vertex AI:
https://cloud.google.com/vertex-ai/docs/reference/rest
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_plus

from proxy.core.apis.json_edit import json_bytes
from proxy.core.apis.json_scan import members

# Only plain characters, without percent-encoding: no upstream can decode such a path into another one.
_PATH: Final = re.compile(
    r"(/v\d\w*/(?:projects/[\w-]+/locations/[\w-]+/)?(?:publishers/[\w-]+/)?models/)"
    r"((?!\.\.?(?:[/:]|$))[\w.~@-]+(?:/(?!(?:\.\.?|operations)(?:[/:]|$))[\w.~@-]+)*)"
    r"(?::([A-Za-z]+)|(?:/operations(?:/[\w-]+)?)?)",
    re.ASCII,
)
COUNT_METHOD: Final = "countTokens"
MANAGED_METHODS: Final = frozenset({"generateContent", "streamGenerateContent", COUNT_METHOD})
STATELESS_METHODS: Final = frozenset({"embedContent", "batchEmbedContents", "predict"})
"""Methods beside the managed ones that store nothing. https://ai.google.dev/api/embeddings"""

KEY_HEADER: Final = "x-goog-api-key"
"""The header with Google's API key."""

_ROOT: Final = re.compile(
    r"/(?:(?:upload|download)/)?v1(?:alpha|beta)\w*/|/v1/projects/[\w-]+/locations/|/ws/google\.ai\.", re.ASCII
)
"""Matches the beginning of every path of this API except ``/v1/``, which OpenAI's API has as well."""


class ModelPath(NamedTuple):
    """The parts of a path that names a model: what precedes the model, the model, the method, and the rest.

    The method is empty for the model itself and its operations. ``rest`` is everything behind the model.
    """

    prefix: str
    model: str
    method: str
    rest: str


def read_path(path: str) -> ModelPath | None:
    """Return the parts of a *path* without its query; None if it names no model."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    return ModelPath(match[1], match[2], match[3] or "", path[match.end(2) :])


def names_model(path: str, method: str) -> bool:
    """True if a request to *path* with the HTTP *method* calls a model by this API.

    Below ``/v1/`` OpenAI's API has models, too. They are only read and deleted, and their names may have a colon, so a
    path there is this API's only if it has a method and is posted to.
    """
    parts = read_path(path)
    if parts is None:
        return False
    return is_below_root(path) or (method == "POST" and bool(parts.method))


def is_below_root(path: str) -> bool:
    """Return True if no other API can have *path*."""
    return _ROOT.match(path) is not None


def split_keys(path_qs: str) -> tuple[str, list[str]]:
    """Return *path_qs* without the API keys in its query, and these keys.

    Google takes a key as the query's ``key`` or in a header: https://cloud.google.com/docs/authentication/api-keys-use
    """
    path, _, query = path_qs.partition("?")
    keys: list[str] = []
    rest: list[str] = []
    for member in query.split("&"):
        name, _, value = member.partition("=")
        if unquote_plus(name) == "key":
            keys.append(unquote_plus(value))
        else:
            rest.append(member)
    query = "&".join(rest)
    if query:
        path = f"{path}?{query}"
    return path, keys


def path_for(path_qs: str, model: str) -> str:
    """Return the path and query of a request with *model* in place of the one that it names."""
    path, mark, query = path_qs.partition("?")
    parts = read_path(path)
    if parts is None:
        return path_qs
    return f"{parts.prefix}{_quoted(model)}{parts.rest}{mark}{query}"


def model_in_resource(name: str) -> str:
    """Return the model at the end of a resource's *name*: ``m`` for ``models/m`` and for ``m``."""
    return name.rpartition("models/")[2]


def renamed_body(body: bytes, model: str, name: str) -> bytes:
    """Return a *body* whose members ``model`` name the resource *model*, with *name* in its place.

    Embeddings in one batch repeat it: https://ai.google.dev/api/embeddings#method:-models.batchembedcontents
    """
    # Quotes inside a JSON string are escaped, so no text of a request matches.
    named = re.compile(rb'(?<!\\)("model"\s*:\s*"(?:[\w/-]+/)?models/)' + re.escape(model.encode()) + rb'"')
    return named.sub(lambda match: match[1] + json_bytes(name)[1:], body)


def _quoted(model: str) -> str:
    return quote(model, safe="/@~")


def generation_path(path_qs: str, model: str) -> str:
    """Return the path of a request to *model* for a whole answer, below the same root as *path_qs*."""
    parts = read_path(path_qs.partition("?")[0])
    prefix = "/v1beta/models/"
    if parts is not None:
        prefix = parts.prefix
    return f"{prefix}{_quoted(model)}:generateContent"


WRAPPED: Final = ("generateContentRequest", "generate_content_request")
"""Members with a whole request whose tokens are to be counted. https://ai.google.dev/api/tokens"""


def count_body(body: bytes, model: str) -> bytes:
    """Return *body*, a request for *model*, as a request for its token count.

    Contents alone are accepted as they are; a body with any other member has to be wrapped.
    """
    fields = members(body.decode())
    names = {field.key for field in fields}
    if names <= {"contents"} or not names.isdisjoint(WRAPPED):
        return body
    inner = body
    if "model" not in names:
        at = body.index(b"{") + 1
        inner = body[:at] + b'"model":' + json_bytes(f"models/{model}") + b"," + body[at:]
    return b'{"generateContentRequest":' + inner + b"}"
