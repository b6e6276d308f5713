"""The answers in which servers state their windows, read from decoded JSON. Figures out of range count as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from proxy.core.models import ServerWindow

LEAST, MOST = 256, 1_000_000_000
"""Windows outside of this range are mistakes: a smaller one would make every request too long."""

MOST_MODELS: Final = 4_000

EVERY: Final = "*"
"""Stands for every model of a server that serves one, whatever clients call it."""

LISTED: Final = ("max_model_len", "context_length", "context_window", "max_context_length")
"""Members of a model's entry in ``/v1/models``: vLLM and SGLang; OpenRouter and Together; Groq; Mistral.

vLLM: https://github.com/vllm-project/vllm/pull/4643. OpenRouter: https://openrouter.ai/docs/api-reference/list-available-models.
"""

Kind = Literal["", "llamacpp", "lmstudio", "ollama", "sglang", "tgi", "other"]

OWNERS: Final[Mapping[str, Kind]] = {
    "llamacpp": "llamacpp",
    "organization_owner": "lmstudio",
    "library": "ollama",
    "sglang": "sglang",
    "vllm": "other",
}
"""Kinds of server by the ``owned_by`` in their entries."""


NAMELESS: Final[frozenset[Kind]] = frozenset({"llamacpp", "sglang"})
"""Kinds that answer with the one model they have, whatever name a request gives."""


class Unreadable(Exception):
    """The server's answer states no window; the text says why."""


def decode(body: bytes) -> object:
    """Return the JSON value of *body*. Raises ``Unreadable``."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Unreadable("an answer that is no JSON") from error


def encode(value: Mapping[str, str]) -> bytes:
    """*value* as JSON."""
    return msgspec.json.encode(value)


def find(windows: Mapping[str, ServerWindow], model: str) -> ServerWindow | None:
    """Return the window of *model* among *windows*, or None. Ollama's clients may leave out the tag ``latest``."""
    return windows.get(model) or windows.get(f"{model}:latest") or windows.get(EVERY)


def rows(answer: object) -> dict[str, Mapping[str, Any]]:
    """Return the entries of ``/v1/models`` by name."""
    entries = _list(answer, "data")[:MOST_MODELS]
    return {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}


def kind(models: Mapping[str, Mapping[str, Any]]) -> Kind:
    """Return the kind of server by its entries of ``/v1/models``; empty if they do not show it."""
    for entry in models.values():
        owner = entry.get("owned_by")
        if isinstance(owner, str) and owner in OWNERS:
            return OWNERS[owner]
    return ""


def listed(models: Mapping[str, Mapping[str, Any]]) -> dict[str, ServerWindow]:
    """Return the windows in entries of ``/v1/models``, by model. An adapter without a figure has its parent's."""
    windows = {name: window for name, entry in models.items() if (window := _entry(entry))}
    for name, entry in models.items():
        parent = entry.get("parent")
        if name not in windows and isinstance(parent, str) and parent in windows:
            windows[name] = windows[parent]
    return windows


def _entry(entry: Mapping[str, Any]) -> ServerWindow | None:
    best = _part(entry, "top_provider")
    figures = {name: figure for name in LISTED if (figure := _figure(entry.get(name)))}
    if (routed := _figure(best.get("context_length"))) is not None:
        figures["top_provider.context_length"] = routed
    # llama.cpp: n_ctx is what a slot has, n_ctx_train what the model was made for and nothing to go by.
    if (running := _figure(_part(entry, "meta").get("n_ctx"))) is not None:
        figures["meta.n_ctx"] = running
    if not figures:
        return None
    how = min(figures, key=lambda name: figures[name])
    output = _figure(best.get("max_completion_tokens"), 1) or _figure(entry.get("max_completion_tokens"), 1)
    return _window(figures[how], None, output, f"/v1/models {how}")


def sglang(answer: object, windows: Mapping[str, ServerWindow]) -> dict[str, ServerWindow]:
    """Return SGLang's *windows* of ``/v1/models``, lowered to its memory for tokens by ``/server_info``.

    https://docs.sglang.io/basic_usage/native_api.html
    """
    info = answer if isinstance(answer, dict) else {}
    pool, longest = _figure(info.get("max_total_num_tokens")), _figure(info.get("max_req_input_len"))
    narrowed = {}
    for name, window in windows.items():
        is_lower = pool is not None and pool < window.context_window
        size = pool if pool is not None and is_lower else window.context_window
        how = "/server_info max_total_num_tokens" if is_lower else window.origin
        narrowed[name] = _window(size, longest, window.max_output_tokens, how)
    return narrowed


def llamacpp(answer: object) -> dict[str, ServerWindow]:
    """Return the window of one slot by llama.cpp's ``/props``, for every name that a request may use.

    https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
    """
    size = _figure(_part(answer, "default_generation_settings").get("n_ctx"))
    return {EVERY: _window(size, None, None, "/props n_ctx")} if size else {}


def lmstudio(answer: object) -> dict[str, ServerWindow] | None:
    """Return the windows of loaded models by LM Studio's ``/api/v0/models``; None if the answer is not LM Studio's.

    Of a model that is not loaded the window is unknown: ``max_context_length`` is the most it could be loaded with
    (https://lmstudio.ai/docs/api/rest-api).
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        return None
    windows = {}
    for entry in _list(answer, "data")[:MOST_MODELS]:
        name = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(name, str) and (size := _figure(entry.get("loaded_context_length"))):
            windows[name] = _window(size, None, None, "/api/v0/models loaded_context_length")
    return windows


def ollama_running(answer: object) -> dict[str, ServerWindow] | None:
    """Return the windows of running models by Ollama's ``/api/ps``; None if the answer is not Ollama's.

    https://docs.ollama.com/api/ps
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("models"), list):
        return None
    windows = {}
    for entry in _list(answer, "models")[:MOST_MODELS]:
        name = (entry.get("model") or entry.get("name")) if isinstance(entry, dict) else None
        if isinstance(name, str) and (size := _figure(entry.get("context_length"))):
            windows[name] = _window(size, None, None, "/api/ps context_length")
    return windows


def ollama_model(answer: object) -> ServerWindow | None:
    """Return the window of a model that is not running by Ollama's ``/api/show``: its ``num_ctx``, at most its longest.

    Without ``num_ctx`` it will run with the server's default, which no route states
    (https://github.com/ollama/ollama/blob/main/docs/api.md).
    """
    size = _num_ctx(answer.get("parameters") if isinstance(answer, dict) else None)
    if size is None:
        return None
    stated = [value for key, value in _part(answer, "model_info").items() if key.endswith(".context_length")]
    longest = [figure for figure in map(_figure, stated) if figure]
    return _window(min([size, *longest]), None, None, "/api/show num_ctx")


def _num_ctx(parameters: object) -> int | None:
    """Return the last ``num_ctx`` in a model's parameters, which are lines of a name and a value."""
    lines = parameters.splitlines() if isinstance(parameters, str) else []
    pairs = [pair for pair in map(str.split, lines) if len(pair) == 2]
    given = [value for name, value in pairs if name == "num_ctx"]
    if not given or not given[-1].isdecimal() or len(given[-1]) >= 12:
        return None
    return _figure(int(given[-1]))


def tgi(answer: object) -> dict[str, ServerWindow]:
    """Return the window and the input limit by TGI's ``/info``, for every name that a request may use.

    https://huggingface.github.io/text-generation-inference/
    """
    info = answer if isinstance(answer, dict) else {}
    size = _figure(info.get("max_total_tokens"))
    longest = _figure(info.get("max_input_tokens")) or _figure(info.get("max_input_length"))
    return {EVERY: _window(size, longest, None, "/info max_total_tokens")} if size else {}


def _window(size: int, longest: int | None, output: int | None, how: str) -> ServerWindow:
    limit = longest if longest is not None and longest < size else None
    return ServerWindow(size, limit, output if output is not None and output < size else None, origin=how)


def _figure(value: object, least: int = LEAST) -> int | None:
    return value if type(value) is int and least <= value <= MOST else None


def _list(answer: object, name: str) -> list[Any]:
    value = answer.get(name) if isinstance(answer, dict) else None
    return value if isinstance(value, list) else []


def _part(answer: object, name: str) -> Mapping[str, Any]:
    value = answer.get(name) if isinstance(answer, dict) else None
    return value if isinstance(value, dict) else {}
