"""Which path means what: managed, relayed, ours; and which relayed paths leave nothing behind at the upstream."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

MANAGED: Final = dict.fromkeys(("/v1/chat/completions", "/chat/completions", "/openai/v1/chat/completions"), "chat")

LIVE: Final = frozenset({"/health/live", "/healthz", "/health/liveliness"})
READY: Final = frozenset({"/health/ready", "/readyz", "/health/readiness"})

_STATELESS_POST: Final = frozenset(
    {"chat/completions", "completions", "embeddings", "messages", "messages/count_tokens", "responses", "moderations"}
    | {"rerank"}
)
_STATELESS_TREES: Final = ("audio/", "images/")


def is_local(path: str) -> bool:
    """Whether *path* is answered here and never relayed."""
    return path in ("/", "/metrics") or path in LIVE or path in READY or path.startswith(("/ullage/", "/health/"))


def api_path(path: str) -> str:
    """*path* below its API root: ``/openai/v1/models`` and ``/models`` are both ``models``."""
    for root in ("/openai/v1/", "/v1/"):
        if path.startswith(root):
            return path[len(root) :]
    return path.lstrip("/")


def listed_model(path: str) -> str | None:
    """The model that a ``GET`` of *path* asks about, empty for all of them; ``None`` where it asks something else."""
    name = api_path(path)
    if name == "models":
        return ""
    model = name.removeprefix("models/")
    return model if model != name and model and not _climbs(path) else None


def wire(path: str) -> str:
    """The API whose error shape callers of *path* understand."""
    name = api_path(path).partition("/")[0]
    return name if name in ("messages", "responses") else "chat"


def is_stateless(method: str, path: str) -> bool:
    """Whether a call of *path* can neither read nor leave anything that another caller of the same key could meet."""
    if _climbs(path):
        return False
    name = api_path(path)
    if method == "POST":
        return name in _STATELESS_POST or name.startswith(_STATELESS_TREES)
    return method in ("GET", "HEAD") and (name in ("models", "realtime") or name.startswith("models/"))


def _climbs(path: str) -> bool:
    # Upstreams may decode more than once before they resolve "..".
    for _ in range(3):
        if any(segment in ("..", ".") for segment in path.replace("\\", "/").split("/")):
            return True
        decoded = unquote(path)
        if decoded == path:
            return False
        path = decoded
    return True
