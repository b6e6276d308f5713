"""Which path means what: managed, relayed, ours; and which relayed paths leave nothing behind at the upstream."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

ROOTS: Final = ("/openai/v1/", "/anthropic/v1/", "/v1/", "/")
"""Where an API's routes begin, the longest first: clients take a base URL with or without its version."""

_APIS: Final = {
    "chat/completions": "chat",
    "messages": "messages",
    "messages/count_tokens": "messages",
    "responses": "responses",
    "responses/compact": "responses",
}

MANAGED: Final = {root + name: api for root in ROOTS for name, api in _APIS.items()}

COUNTING: Final = frozenset(path for path in MANAGED if path.endswith("/count_tokens"))
"""Managed routes that ask what a conversation weighs instead of going on with it."""

COMPACTING: Final = frozenset(path for path in MANAGED if path.endswith("/compact"))
"""Managed routes that ask for a smaller conversation instead of going on with it."""

# Plain names only: what an upstream could decode into another path is none.
_DEPLOYMENT: Final = re.compile(r"/openai/deployments/((?!\.\.?/)[\w.~-]+)/(.+)", re.ASCII)

# What RFC 3986 (section 3.3) lets stand in a segment, but for escapes and the semicolon that begins parameters.
_ORDINARY: Final = re.compile(r"(?:/[\w.~!$&'()*+,=:@-]+)+/?", re.ASCII)
_DECODINGS: Final = 3

LIVE: Final = frozenset({"/health/live", "/healthz", "/health/liveliness"})
READY: Final = frozenset({"/health/ready", "/readyz", "/health/readiness"})

_STATELESS_POST: Final = frozenset(
    {"chat/completions", "completions", "embeddings", "messages", "messages/count_tokens", "responses", "moderations"}
    | {"rerank", "responses/compact", "responses/input_tokens"}
)
# First parts of the paths of OpenAI's and Anthropic's APIs, which clients also send without a version before them.
_RESOURCES: Final = frozenset(
    {"assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings", "evals"}
    | {"files", "fine_tuning", "images", "messages", "models", "moderations", "organization", "organizations"}
    | {"projects", "realtime", "rerank", "responses", "skills", "threads", "uploads", "vector_stores", "videos"}
)
_STATELESS_TREES: Final = ("audio/", "images/")


def is_local(path: str) -> bool:
    """Whether *path* is answered here and never relayed."""
    return path in ("/", "/metrics") or path in LIVE or path in READY or path.startswith(("/ullage/", "/health/"))


def api_path(path: str) -> str:
    """*path* below its API root: ``/openai/v1/models`` and ``/models`` are both ``models``."""
    for root in ROOTS[:-1]:
        if path.startswith(root):
            return path[len(root) :]
    deployed = _DEPLOYMENT.fullmatch(path)
    return deployed[2] if deployed else path.lstrip("/")


def is_stranger(path: str) -> bool:
    """Return True if *path* is below none of the APIs' roots and is no API's path without its root either."""
    rooted = path.startswith(ROOTS[:-1]) or _DEPLOYMENT.fullmatch(path) is not None
    return not rooted and path.lstrip("/").partition("/")[0] not in _RESOURCES


def misses_root(path: str) -> bool:
    """Return True if *path* ends as an API's route does: its client was given a base URL with another path."""
    return path.endswith(tuple(f"/{name}" for name in (*_APIS, "completions", "embeddings", "models")))


def managed(path: str) -> tuple[str, str] | None:
    """The API of a managed *path* and the model it names, if it does; ``None`` for every other path."""
    if path in MANAGED:
        return MANAGED[path], ""
    deployed = _DEPLOYMENT.fullmatch(path)
    if deployed is None or deployed[2] not in _APIS:
        return None
    return _APIS[deployed[2]], deployed[1]


def listed_model(path: str) -> str | None:
    """The model that a ``GET`` of *path* asks about, empty for all of them; ``None`` where it asks something else."""
    name = api_path(path)
    if _plain(path) is None:
        return None
    if name == "models":
        return ""
    model = name.removeprefix("models/")
    return model if model != name and model else None


def wire(path: str) -> str:
    """The API whose error shape callers of *path* understand."""
    name = api_path(path).partition("/")[0]
    return name if name in ("messages", "responses") else "chat"


def is_stateless(method: str, path: str) -> bool:
    """Whether a call of *path* can neither read nor leave anything that another caller of the same key could meet."""
    plain = _plain(path)
    if plain is None:
        return False
    if method == "POST":
        # By the name as it stands: managed routes are recognised by it, and an escaped one would slip past them.
        return api_path(path) in _STATELESS_POST or api_path(plain).startswith(_STATELESS_TREES)
    name = api_path(plain)
    return method in ("GET", "HEAD") and (name in ("models", "realtime") or name.startswith("models/"))


def _plain(path: str) -> str | None:
    """*path* without escapes; None if some server might take it for another path.

    Servers and what stands before them decode once or twice, resolve ``..``, cut off ``;parameters``, merge slashes and
    take a backslash for one, in any order. A path of ordinary characters in which nothing of that is left to do is the
    same path to all of them.
    """
    for _ in range(_DECODINGS):
        path = unquote(path)
    segments = path.split("/")
    if not _ORDINARY.fullmatch(path) or "." in segments or ".." in segments:
        return None
    return path
