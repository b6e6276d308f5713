"""Reads the windows that servers state from their decoded JSON answers. Figures out of range count as absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from proxy.core.apis.json_steps import as_object, objects
from proxy.core.learned_window import LEAST_PLAUSIBLE, MOST_PLAUSIBLE
from proxy.core.models import ServerWindow

MOST_MODELS: Final = 4_000
"""Entries of a list of models that are read."""

EVERY_MODEL: Final = "*"
"""The name for every model of a server that has only one, whatever clients call it."""

LISTED: Final = ("max_model_len", "context_length", "context_window", "max_context_length")
"""Members of a model's entry in ``/v1/models``: vLLM and SGLang; OpenRouter and Together; Groq; Mistral.

vLLM: https://github.com/vllm-project/vllm/pull/4643. OpenRouter: https://openrouter.ai/docs/guides/overview/models.
"""

Kind = Literal["", "llamacpp", "lmstudio", "ollama", "sglang", "tgi", "other"]

KINDS_BY_OWNER: Final[Mapping[str, Kind]] = {
    "llamacpp": "llamacpp",
    "organization_owner": "lmstudio",
    "library": "ollama",
    "sglang": "sglang",
    "vllm": "other",
}
"""Kinds of server by the ``owned_by`` in their entries of ``/v1/models``.

SGLang: https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/entrypoints/openai/protocol.py.
Ollama gives the namespace of a model: https://github.com/ollama/ollama/blob/main/openai/openai.go.
The others were read from answers of their servers.
"""

ONE_MODEL_KINDS: Final[frozenset[Kind]] = frozenset({"llamacpp", "sglang"})
"""Kinds that answer with the one model they have, whatever name a request gives."""


class Unreadable(Exception):
    """The server's answer states no window; the text says why."""


def decode(body: bytes) -> object:
    """Return the JSON value of *body*. Raises ``Unreadable``."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Unreadable("an answer that is no JSON") from error


def find_window(windows: Mapping[str, ServerWindow], model: str) -> ServerWindow | None:
    """Return the window of *model* among *windows*, or None. Ollama's clients may leave out the tag ``latest``."""
    if not windows:
        return None  # most servers state none, so the common case builds no string
    return windows.get(model) or windows.get(f"{model}:latest") or windows.get(EVERY_MODEL)


def model_entries(answer: object) -> dict[str, Mapping[str, Any]]:
    """Return the entries of ``/v1/models`` by name."""
    return {entry["id"]: entry for entry in _objects(answer, "data") if isinstance(entry.get("id"), str)}


def server_kind(models: Mapping[str, Mapping[str, Any]]) -> Kind:
    """Return the kind of server by its entries of ``/v1/models``; empty if they do not show it."""
    for entry in models.values():
        owner = entry.get("owned_by")
        if isinstance(owner, str) and owner in KINDS_BY_OWNER:
            return KINDS_BY_OWNER[owner]
    return ""


def listed_windows(models: Mapping[str, Mapping[str, Any]]) -> dict[str, ServerWindow]:
    """Return the windows in entries of ``/v1/models``, by model. An adapter without a figure has its parent's."""
    windows = {name: window for name, entry in models.items() if (window := _entry(entry))}
    for name, entry in models.items():
        parent = entry.get("parent")
        if name not in windows and isinstance(parent, str) and parent in windows:
            windows[name] = windows[parent]
    return windows


def _entry(entry: Mapping[str, Any]) -> ServerWindow | None:
    """Return the smallest window that an *entry* of ``/v1/models`` states, or None."""
    top_provider = _object(entry, "top_provider")
    stated = {name: entry.get(name) for name in LISTED}
    stated["top_provider.context_length"] = top_provider.get("context_length")
    # llama.cpp: n_ctx is the window of a slot; n_ctx_train is that of the training, which the server need not have.
    stated["meta.n_ctx"] = _object(entry, "meta").get("n_ctx")
    figures = {name: figure for name, value in stated.items() if (figure := _figure(value))}
    if not figures:
        return None
    origin = min(figures, key=lambda name: figures[name])
    output = _figure(top_provider.get("max_completion_tokens"), 1) or _figure(entry.get("max_completion_tokens"), 1)
    return _window(figures[origin], None, output, f"/v1/models {origin}")


def sglang_windows(answer: object, windows: Mapping[str, ServerWindow]) -> dict[str, ServerWindow]:
    """Return SGLang's *windows* of ``/v1/models``, lowered to its memory for tokens by ``/server_info``.

    https://docs.sglang.io/basic_usage/native_api.html
    """
    info = as_object(answer)
    pool, longest = _figure(info.get("max_total_num_tokens")), _figure(info.get("max_req_input_len"))
    narrowed = {}
    for name, window in windows.items():
        size, origin = window.context_window, window.origin
        if pool is not None and pool < size:
            size, origin = pool, "/server_info max_total_num_tokens"
        narrowed[name] = _window(size, longest, window.max_output_tokens, origin)
    return narrowed


def llamacpp_window(answer: object) -> dict[str, ServerWindow]:
    """Return the window of one slot by llama.cpp's ``/props``, for every name that a request may use.

    https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
    """
    size = _figure(_object(answer, "default_generation_settings").get("n_ctx"))
    if size is None:
        return {}
    return {EVERY_MODEL: _window(size, None, None, "/props n_ctx")}


def lmstudio_windows(answer: object) -> dict[str, ServerWindow] | None:
    """Return the windows of loaded models by LM Studio's ``/api/v0/models``; None if the answer is not LM Studio's.

    Of a model that is not loaded the window is unknown: ``max_context_length`` is the most it could be loaded with
    (https://lmstudio.ai/docs/api/rest-api).
    """
    if not isinstance(as_object(answer).get("data"), list):
        return None
    windows = {}
    for entry in _objects(answer, "data"):
        name = entry.get("id")
        if isinstance(name, str) and (size := _figure(entry.get("loaded_context_length"))):
            windows[name] = _window(size, None, None, "/api/v0/models loaded_context_length")
    return windows


def ollama_running_windows(answer: object) -> dict[str, ServerWindow] | None:
    """Return the windows of running models by Ollama's ``/api/ps``; None if the answer is not Ollama's.

    https://docs.ollama.com/api/ps
    """
    if not isinstance(as_object(answer).get("models"), list):
        return None
    windows = {}
    for entry in _objects(answer, "models"):
        name = entry.get("model") or entry.get("name")
        if isinstance(name, str) and (size := _figure(entry.get("context_length"))):
            windows[name] = _window(size, None, None, "/api/ps context_length")
    return windows


def ollama_window(answer: object) -> ServerWindow | None:
    """Return the window of a model that is not running by Ollama's ``/api/show``: its ``num_ctx``, at most its longest.

    Without ``num_ctx`` it will run with the server's default, which no route states
    (https://github.com/ollama/ollama/blob/main/docs/api.md#show-model-information).
    """
    size = _num_ctx(as_object(answer).get("parameters"))
    if size is None:
        return None
    stated = [value for key, value in _object(answer, "model_info").items() if key.endswith(".context_length")]
    longest = [figure for figure in map(_figure, stated) if figure]
    return _window(min([size, *longest]), None, None, "/api/show num_ctx")


def _num_ctx(parameters: object) -> int | None:
    """Return the last ``num_ctx`` in a model's parameters, which are lines of a name and a value."""
    if not isinstance(parameters, str):
        return None
    pairs = [pair for pair in map(str.split, parameters.splitlines()) if len(pair) == 2]
    values = [value for name, value in pairs if name == "num_ctx"]
    if not values or not values[-1].isdecimal() or len(values[-1]) >= 12:
        return None
    return _figure(int(values[-1]))


def tgi_window(answer: object) -> dict[str, ServerWindow]:
    """Return the window and the input limit by TGI's ``/info``, for every name that a request may use.

    https://huggingface.github.io/text-generation-inference/
    """
    info = as_object(answer)
    size = _figure(info.get("max_total_tokens"))
    longest = _figure(info.get("max_input_tokens")) or _figure(info.get("max_input_length"))
    if size is None:
        return {}
    return {EVERY_MODEL: _window(size, longest, None, "/info max_total_tokens")}


def _window(size: int, longest: int | None, output: int | None, origin: str) -> ServerWindow:
    """Return a window of *size* tokens. Limits of input and output that are not smaller limit nothing."""
    return ServerWindow(size, _below(longest, size), _below(output, size), origin=origin)


def _below(limit: int | None, size: int) -> int | None:
    if limit is None or limit >= size:
        return None
    return limit


def _figure(value: object, least: int = LEAST_PLAUSIBLE) -> int | None:
    """Return *value* if it is a number of tokens, else None."""
    if type(value) is int and least <= value <= MOST_PLAUSIBLE:
        return value
    return None


def _object(answer: object, name: str) -> Mapping[str, Any]:
    """Return the object that is the member *name* of *answer*; empty if there is none."""
    return as_object(as_object(answer).get(name))


def _objects(answer: object, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the objects in the list that is the member *name* of *answer*, ``MOST_MODELS`` entries at most."""
    return objects(as_object(answer).get(name))[:MOST_MODELS]
