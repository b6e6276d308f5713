"""Recall over ``/v1/chat/completions``: a generation is one assistant message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from proxy.core.apis.usage import usage_of
from proxy.features.recall.events import dumped, written
from proxy.features.recall.grown import grown, plain
from proxy.features.recall.merger import NOT_RUN, Call, StreamMerger
from proxy.features.recall.tool import NAME

_OWN: Final = ("role", "content", "tool_calls")
_MOST_MEMBERS: Final = 32
_CUT: Final = frozenset({"length", "content_filter"})
"""Why an answer ends whose last call may be half."""


def said(answer: Mapping[str, Any]) -> Any:
    """The message of a whole answer; ``None`` where it has not exactly one."""
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    message = first.get("message") if isinstance(first, dict) else None
    return message if isinstance(message, dict) else None


def is_cut(answer: Mapping[str, Any]) -> bool:
    """Whether it was broken off."""
    return str(answer["choices"][0].get("finish_reason")) in _CUT


def calls(said: Mapping[str, Any]) -> list[Call]:
    """The calls of the tool in a message."""
    return [Call(str(call.get("id") or ""), _arguments(call)) for call in _listed(said) if _is_ours(call)]


def asked(said: Mapping[str, Any], body: bytes) -> list[Any]:
    """The message to go on from. What only some servers know in it goes back where the client sends it back too."""
    odd = [key for key, value in said.items() if key not in _OWN and value]
    # Each is looked for in the whole body: a message of thousands of members would cost seconds.
    more = {key: said[key] for key in odd[:_MOST_MEMBERS] if dumped(key) in body}
    return [{"role": "assistant", "content": said.get("content") or None, **more, "tool_calls": _listed(said)}]


def answered(said: Mapping[str, Any], texts: Sequence[str]) -> list[Any]:
    """A tool message for each call."""
    left = iter(texts)
    pairs = [(call.get("id"), next(left) if _is_ours(call) else NOT_RUN) for call in _listed(said)]
    return [{"role": "tool", "tool_call_id": str(name or ""), "content": text} for name, text in pairs]


def whole(answer: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last answer, its text behind that of the *earlier* messages."""
    choice = answer["choices"][0]
    message = dict(choice["message"])
    texts = list(_texts([*earlier, message]))
    if len(texts) > 1 or (texts and not message.get("content")):
        message["content"] = "".join(_apart(texts))
    finish = choice.get("finish_reason")
    if calls(message):
        finish = _without_calls(message, finish)
    return {**answer, "choices": [{**choice, "message": message, "finish_reason": finish}]}


def _without_calls(message: dict[str, Any], finish: Any) -> Any:
    """Remove the tool's calls from *message*, and return why it ends without them."""
    left = [call for call in _listed(message) if not _is_ours(call)]
    message.pop("tool_calls")
    if left:
        message["tool_calls"] = left
        return finish
    message["content"] = message.get("content") or ""
    return "stop" if finish == "tool_calls" else finish


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of *messages* that are not empty."""
    for message in messages:
        text = message.get("content")
        if isinstance(text, str) and text:
            yield text


used = usage_of


def stream() -> StreamMerger:
    """The stream of a new answer."""
    return Stream()


class Stream(StreamMerger):
    """Chunks of one assistant message. The ids of the first generation stand for all."""

    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] = {}
        self._slots: list[dict[str, Any]] = []
        self._newest: dict[Any, int] = {}
        self._left: dict[int, int] | None = None
        self._head: dict[str, Any] = {}
        self._places: dict[int, list[int]] = {}
        self._role_told = False
        self._before = ""

    @property
    def said(self) -> dict[str, Any]:
        """The message as it was put together."""
        message = {key: plain(member) for key, member in self._message.items()}
        return {**message, "tool_calls": [self._call(slot) for slot in self._slots]} if self._slots else message

    def calls(self) -> list[Call]:
        """See ``StreamMerger``."""
        return calls(self.said)

    def _call(self, slot: Mapping[str, Any]) -> dict[str, Any]:
        return {key: plain(member) for key, member in slot.items()}

    def _note(self, value: dict[str, Any]) -> None:
        self.failed = self.failed or bool(value.get("error"))
        choice = _choice(value)
        if choice and not self._head:
            self._head = {key: value[key] for key in ("id", "created") if key in value}
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        self.cut = self.cut or str(choice.get("finish_reason")) in _CUT
        self._grow(value)

    def _grow(self, value: dict[str, Any]) -> None:
        """Add the delta of *value* to the message."""
        for key, member in _delta(value).items():
            if key == "tool_calls":
                self._places[id(value)] = [self._noted(piece) for piece in _pieces(member)]
            elif member is not None:
                self._message[key] = grown(key, self._message.get(key), member)

    def _noted(self, piece: dict[str, Any]) -> int:
        """The place of the call that *piece* is of; some servers give every call the same index."""
        index, name = piece.get("index"), piece.get("id")
        key = index if isinstance(index, int | str) else None
        at = self._newest.get(key, -1)
        if at < 0 or (name and self._slots[at].get("id") not in (None, "", name)):
            at = self._newest[key] = len(self._slots)
            self._slots.append({"index": index})
        slot = self._slots[at]
        for name, member in piece.items():
            if member is not None and name != "index":
                slot[name] = grown(name, slot.get(name), member)
        return at

    def _stripped(self) -> dict[int, int]:
        """The new indexes of the calls that stand, by their places; those that come behind the end do not."""
        if self._left is None:
            stand = [at for at, slot in enumerate(self._slots) if not _is_ours(self._call(slot))]
            self._left = {at: index for index, at in enumerate(stand)}
        return self._left

    def _begins_hold(self, value: dict[str, Any]) -> bool:
        return bool(_delta(value).get("tool_calls"))

    def _seen(self, value: dict[str, Any]) -> None:
        self._role_told = self._role_told or "role" in _delta(value)
        self._places.pop(id(value), None)

    def _rewritten(self, value: dict[str, Any]) -> bytes:
        choice, delta = _choice(value), dict(_delta(value))
        places = self._places.pop(id(value), [])
        self._continue(delta)
        finish = choice.get("finish_reason")
        if self._strip:
            self._strip_calls(delta, places)
            finish = "stop" if finish == "tool_calls" and not self._stripped() else finish
        if choice and finish is None and not any(delta.values()) and not value.get("usage"):
            return b""
        made = {**value, **{key: held for key, held in self._head.items() if key in value}}
        if choice:
            made["choices"] = [{**choice, "delta": delta, "finish_reason": finish}]
        return written(made)

    def _continue(self, delta: dict[str, Any]) -> None:
        """Make *delta* follow what was sent before it: the role stands once, and a second text begins a paragraph."""
        if self._role_told:
            delta.pop("role", None)
        self._role_told = self._role_told or "role" in delta
        if isinstance(delta.get("content"), str) and delta["content"]:
            delta["content"] = _gap(self._before) + delta["content"]
            self._before = ""

    def _strip_calls(self, delta: dict[str, Any], places: Sequence[int]) -> None:
        """Remove the tool's calls from *delta*, whose pieces belong to the calls at *places*, and renumber the rest."""
        if "tool_calls" not in delta:
            return
        left = self._stripped()
        pieces = zip(_pieces(delta.pop("tool_calls")), places, strict=True)
        kept = [{**piece, "index": left[at]} for piece, at in pieces if at in left]
        if kept:
            delta["tool_calls"] = kept

    def _begin(self) -> None:
        text = plain(self._message.get("content"))
        self._before = text if isinstance(text, str) and text else self._before
        self._message, self._slots, self._places, self._newest, self._left = {}, [], {}, {}, None


def _choice(value: Mapping[str, Any]) -> dict[str, Any]:
    choices = value.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _delta(value: Mapping[str, Any]) -> dict[str, Any]:
    delta = _choice(value).get("delta")
    return delta if isinstance(delta, dict) else {}


def _pieces(member: Any) -> list[dict[str, Any]]:
    """The pieces of calls in a delta."""
    return [piece for piece in member if isinstance(piece, dict)] if isinstance(member, list) else []


def _listed(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a message, as they go back: without their index in a stream."""
    found = said.get("tool_calls")
    listed = [call for call in found if isinstance(call, dict)] if isinstance(found, list) else []
    return [{"type": "function", **{key: held for key, held in call.items() if key != "index"}} for call in listed]


def _is_ours(call: Mapping[str, Any]) -> bool:
    function = call.get("function")
    return isinstance(function, dict) and function.get("name") == NAME


def _arguments(call: Mapping[str, Any]) -> str:
    given = call["function"].get("arguments")
    if isinstance(given, str):
        return given
    return dumped(given).decode() if given else ""


def _gap(before: str) -> str:
    """What stands between the texts of two generations: the second begins a paragraph of its own."""
    return "\n\n" if before and not before[-1].isspace() else ""


def _apart(texts: Sequence[str]) -> list[str]:
    return [_gap(before) + text for before, text in zip(("", *texts), texts, strict=False)]
