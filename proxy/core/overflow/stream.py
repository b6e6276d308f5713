"""Finds overflows in an answer as its bytes arrive: before its first content, and after it.

A server may answer 200 and then report an overflow, as JSON or as an event. Until an answer shows content its bytes are
buffered, so that a smaller view can be sent instead. ``EarlyOverflowDetector`` decides how long:

      state                  bytes                                          next state
      format unknown         blanks                                         format unknown
                             ``{`` or ``[``                                 JSON
                             a field of an event, or declared as events     events
                             anything else                                  content
      JSON                   a member that answers have, before any error   content
                             more than can be read                          content
                             its end                                        overflow if it reports one, else content
      events                 a start-up event, a comment                    events
      any of these           more than an opening has                       content
                             an error                                       overflow if it reports one, else content
                             any other event, or one that is too long       content

``content`` and ``overflow`` are final. After the first content no smaller view can be sent any more. But a window can
be learned from an overflow that is reported there, so ``LateOverflowDetector`` searches the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal

from proxy.core.apis.sse import EventCutter
from proxy.core.content_encoding import ContentDecoder
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.error_body import is_error, parse_body, stated_status
from proxy.core.overflow.evidence import NO_PRIOR, Prior
from proxy.core.overflow.kinds import Overflow

Verdict = Literal["undecided", "content", "overflow"]

PREAMBLE_TYPES = frozenset(
    {"response.created", "response.queued", "response.in_progress", "message_start", "ping", "keepalive"}
    | {"codex.rate_limits"}
)
"""The ``type`` of events that come before any content.

Responses: https://platform.openai.com/docs/api-reference/responses-streaming
Messages: https://platform.claude.com/docs/en/build-with-claude/streaming
"""

_OPENINGS: Final = {
    "content_block_start": "content_block",
    "response.output_item.added": "item",
    "response.content_part.added": "part",
    "response.reasoning_summary_part.added": "part",
}
"""The ``type`` of events that open a part of an answer, and the member that holds it. It is content if it has any."""

_EMPTY_PARTS: Final = frozenset({"text", "thinking", "message", "reasoning", "output_text", "summary_text"})
"""The ``type`` of parts that open without content; a tool's part names the tool."""

_PART_TEXTS: Final = ("text", "thinking", "content", "summary", "encrypted_content")
"""Members of such a part that hold its content."""

_GEMINI_OPENING: Final = frozenset({"candidates", "usageMetadata", "modelVersion", "responseId", "createTime"})
"""Members of an event of Gemini's API that may come before any content; a ``promptFeedback`` is an answer.

https://ai.google.dev/api/generate-content#generatecontentresponse
"""

LONGEST = 262_144
"""Bytes of the longest event, and of the longest answer that is no stream, that are buffered; errors are shorter."""

_LINES: Final = (b"data", b"event", b"id:", b"retry", b":", b"error")
"""Beginnings of the lines of an event: https://html.spec.whatwg.org/multipage/server-sent-events.html

llama.cpp wrote errors in lines of their own name: https://github.com/ggml-org/llama.cpp/issues/16104
"""

_MOST_OPENING: Final = 2**20
"""Bytes of comments and blanks before the first content after which the answer is passed on anyway."""

_ANSWERS: Final = re.compile(
    rb'"(?:choices|content|output|candidates|completion|data)"\s{0,32}:\s{0,32}(?:[^\sn\[]|\[\s{0,32}[^\s\]])'
)
"""Members that only answers have, in any API, with a value: in an error they are null or empty."""

_LONGEST_ANSWERS: Final = 128
"""Bytes that such a member's name, blanks, signs and first byte take at most."""

_REASON = re.compile(rb'"(?:native_)?(?:stop_reason|finish_reason|reason)"\s*:\s*"([A-Za-z_]{4,64})"')
"""A member with the reason why generation stopped."""

_ENDING_EVENT: Final = 65_536
"""Bytes of the longest event after the first content that is buffered."""

_MOST_SEARCHED: Final = 2**25
"""Decoded bytes of a compressed answer that are searched after its first content."""

_TAIL: Final = 128
"""Bytes of the last chunk that are searched again with the next one: more than a stop reason has."""

_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
"""Bytes that may come before an answer: blanks and a byte order mark."""


class EarlyOverflowDetector:
    """Watches the beginning of an answer with status 200, streamed or not, until its first content or its error.

    Feed it the bytes as they arrive, in any chunking. ``stated_status`` is the status that an error other than an
    overflow states; 200 for everything else.
    """

    def __init__(
        self, classifier: Classifier, content_type: str = "", encoding: str = "", prior: Prior = NO_PRIOR
    ) -> None:
        """*content_type* and *encoding* are headers of the answer, *prior* has the facts of its request."""
        self.verdict: Verdict = "undecided"
        self.overflow: Overflow | None = None
        self.stated_status = 200
        self._classifier = classifier
        self._prior = prior
        self._is_declared = content_type.startswith("text/event-stream")
        self._decoder = None
        if encoding:
            self._decoder = ContentDecoder(encoding, 2 * LONGEST)
        self._buffer = bytearray()
        self._is_stream: bool | None = None
        self._cutter: EventCutter | None = None
        self._searched = 0
        self._size = 0
        self._has_error = False
        self._claim: Callable[[Prior], Overflow | None] | None = None

    def feed(self, chunk: bytes) -> Verdict:
        """Return the verdict after *chunk*."""
        if self.verdict != "undecided":
            return self.verdict
        data = chunk
        if self._decoder is not None:
            data = self._decoder.feed(chunk)
        if self._is_stream is None:
            self._buffer += data
            self._is_stream = self._recognise()
            data = bytes(self._buffer)
        elif not self._is_stream:
            self._buffer += data
        if self._is_stream:
            self._feed_events(data)
        elif self._is_stream is False and (len(self._buffer) > LONGEST or self._is_answer()):
            self.verdict = "content"
        self._size += len(chunk)
        if self.verdict == "undecided" and self._size > _MOST_OPENING:
            self.verdict = "content"
        return self.verdict

    def finish(self) -> Verdict:
        """Return the verdict at the end of the answer, whose last event may lack its blank line."""
        if self.verdict != "undecided":
            return self.verdict
        rest = bytes(self._buffer)
        if self._cutter is not None:
            rest = self._cutter.flush()
        if not rest.strip():
            return self.verdict
        if self._is_stream is False:
            self._decide(partial(self._classifier.answer, 200, (), rest), parse_body(rest))
        else:
            self._read_event(rest)
        return self.verdict

    def overflow_for(self, prior: Prior) -> Overflow | None:
        """Return ``overflow`` if it can be true of the request that *prior* describes, else None."""
        if self.overflow is None or self._claim is None:
            return None
        return _too_long(self._claim(prior))

    def _feed_events(self, data: bytes) -> None:
        if self._cutter is None:
            self._cutter = EventCutter()
        for event in self._cutter.feed(data):
            self._read_event(event.rstrip(b"\r\n"))
            if self.verdict != "undecided":
                return
        # An event ends in a line end and a blank line: up to three bytes more.
        if self._cutter.pending_size > LONGEST + 3:
            self.verdict = "content"

    def _is_answer(self) -> bool:
        """True if the JSON so far shows content before any error. Searches new bytes only."""
        if self._has_error:
            return False
        answer = _ANSWERS.search(self._buffer, self._searched)
        self._searched = max(0, len(self._buffer) - _LONGEST_ANSWERS)
        if answer is None:
            return False
        before = bytes(self._buffer[: answer.start()])
        # An error may quote an answer's members: it is read when the whole body is here.
        self._has_error = before.find(b'"error"') >= 0 or before.find(b'"errors"') >= 0
        return not self._has_error

    def _recognise(self) -> bool | None:
        """True if this is a stream of events, False if it is JSON; None until enough bytes are here."""
        # Blanks that keep a connection alive are dropped at once, or every chunk would search them again.
        self._buffer = self._buffer.lstrip(_BLANK)
        begun = bytes(self._buffer[:5])
        if not begun:
            return None
        if begun[:1] in (b"{", b"["):
            return False
        if self._is_declared or begun.startswith(_LINES):
            return True
        if len(begun) == 5:
            self.verdict = "content"  # neither events nor JSON
        return None

    def _read_event(self, event: bytes) -> None:
        if len(event) > LONGEST:
            self.verdict = "content"
            return
        data, value = _event(event)
        if not data:
            return
        if is_error(value):
            self._decide(partial(self._classifier.event, value), value)
        elif value is None or not _is_preamble(value):
            self.verdict = "content"

    def _decide(self, claim: Callable[[Prior], Overflow | None], value: Any) -> None:
        """Set the verdict by the *claim* of an answer or event with *value*."""
        self._claim = claim
        self.overflow = _too_long(claim(self._prior))
        if self.overflow is not None:
            self.verdict = "overflow"
            return
        self.verdict = "content"
        if is_error(value):
            self.stated_status = stated_status(value)


class LateOverflowDetector:
    """Searches an answer after its first content for errors in the stream and for the reason why generation stopped.

    ``overflow`` is the first overflow in it. It is only learned from: the client already has a part of the answer.
    """

    def __init__(self, classifier: Classifier, encoding: str = "") -> None:
        """*encoding* is the answer's content-encoding."""
        self.overflow: Overflow | None = None
        self._classifier = classifier
        self._decoder = None
        if encoding:
            self._decoder = ContentDecoder(encoding, _MOST_SEARCHED)
        self._event = bytearray()
        self._may_hold_error = False
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Search *chunk*; never raises."""
        if self.overflow is not None:
            return
        data = chunk
        if self._decoder is not None:
            data = self._decoder.feed(chunk)
        if not data:
            return
        near = self._tail + data
        # ``find`` and not ``in``: for bytes ``in`` first tries an integer, which raises and drops an exception.
        self._may_hold_error = self._may_hold_error or near.find(b'"error"') >= 0 or near.find(b"event: error") >= 0
        if self._may_hold_error or not data.endswith(b"\n\n"):
            self._search_events(data)
        else:
            self._event.clear()  # most chunks are whole events: this one ended here, without an error
        if near.find(b"exceeded") >= 0 and self.overflow is None:
            self._search_stop_reason(near)
        self._tail = near[-_TAIL:]

    def _search_events(self, data: bytes) -> None:
        """Search the events that *data* completes for errors; buffer the beginning of the next one."""
        edge, end = data, -1
        if data.find(b"\n") >= 0 or data.find(b"\r") >= 0:  # most JSON has no line end, so it completes no event
            edge = bytes(self._event[-3:]) + data
            end = max(edge.rfind(b"\n\n"), edge.rfind(b"\r\n\r\n"), edge.rfind(b"\r\r"))
        self._event += data
        if end >= 0:
            at = len(self._event) - len(edge) + end
            if self._may_hold_error:
                self._search_errors(bytes(self._event))
            del self._event[:at]
            self._may_hold_error = b'"error"' in self._event or b"event: error" in self._event
        if len(self._event) > _ENDING_EVENT:
            self._event.clear()
            self._may_hold_error = False

    def _search_errors(self, events: bytes) -> None:
        """Note the first overflow among *events*."""
        for event in EventCutter().feed(events):
            _, value = _event(event)
            if value is None or not is_error(value):
                continue
            self.overflow = self._classifier.event(value)
            if self.overflow is not None:
                return

    def _search_stop_reason(self, data: bytes) -> None:
        """Note an overflow if *data* holds the reason that generation reached the window."""
        for reason in _REASON.finditer(data):
            self.overflow = self._classifier.stop({"stop_reason": reason[1].decode()})
            if self.overflow is not None:
                return


def _too_long(claim: Overflow | None) -> Overflow | None:
    """Return *claim* if a smaller view may succeed; else None."""
    if claim is None or not claim.too_long:
        return None
    return claim


def _fields(event: bytes) -> Iterator[tuple[bytes, bytes]]:
    for line in event.splitlines():
        name, colon, value = line.partition(b":")
        if colon:
            yield name, value.strip()


def _event(event: bytes) -> tuple[bytes, Any]:
    """Return the data of an event, and the object in it or None. An error in plain text becomes an object."""
    fields = list(_fields(event))
    data = b"\n".join(value for name, value in fields if name in (b"data", b"error"))
    if not data:
        return data, None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = data.decode("utf-8", "replace")
    if is_error(value):
        return data, value
    if (b"event", b"error") in fields or any(name == b"error" for name, _ in fields):
        return data, {"error": value}
    if not isinstance(value, dict | list):
        return data, None
    return data, _error_in_choice(value) or value


def _error_in_choice(value: Any) -> dict[str, Any] | None:
    """Return the error in place of a choice, as an error object; None if there is none, or content beside it.

    OpenRouter: https://openrouter.ai/docs/api/reference/errors-and-debugging
    """
    if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
        return None
    choices = value["choices"]
    for choice in choices:
        if isinstance(choice, dict) and choice.get("error") and not _has_content(choice.get("delta") or {}):
            return {"error": choice["error"]}
    return None


def _is_preamble(value: Any) -> bool:
    """True if an event has no content yet: a start-up event, or a delta with nothing but a role."""
    if not isinstance(value, dict):
        return False
    kind = str(value.get("type"))
    if kind in PREAMBLE_TYPES:
        return True
    if kind in _OPENINGS:
        return _is_empty_part(value.get(_OPENINGS[kind]))
    if "usageMetadata" in value or "candidates" in value:
        return _is_gemini_preamble(value)
    return _is_chat_preamble(value)


def _is_chat_preamble(value: Mapping[str, Any]) -> bool:
    """True if an event of Chat Completions has no more than a role."""
    choices = value.get("choices")
    if not isinstance(choices, list) or (value.get("usage") and not choices):
        return False
    deltas = [choice.get("delta") for choice in choices if isinstance(choice, dict)]
    ended = any(choice.get("finish_reason") for choice in choices if isinstance(choice, dict))
    return not ended and all(isinstance(delta, dict) and not _has_content(delta) for delta in deltas)


def _is_gemini_preamble(value: Mapping[str, Any]) -> bool:
    """True if an event of Gemini's API has figures and empty texts only."""
    candidates = value.get("candidates", [])
    if not _GEMINI_OPENING.issuperset(value) or not isinstance(candidates, list):
        return False
    return all(_is_empty_candidate(candidate) for candidate in candidates)


def _is_empty_candidate(candidate: Any) -> bool:
    """True if a candidate has no text, call or end yet."""
    if not isinstance(candidate, dict) or candidate.keys() - {"content", "index"}:
        return False
    content = candidate.get("content", {})
    if not isinstance(content, dict):
        return False
    return content.get("parts", []) in ([], [{"text": ""}])


def _is_empty_part(part: Any) -> bool:
    """True if a part of an answer that opens has no content yet."""
    if not isinstance(part, dict) or part.get("type") not in _EMPTY_PARTS:
        return False
    return not any(part.get(name) for name in _PART_TEXTS)


def _has_content(delta: dict[str, Any]) -> bool:
    return any(value for key, value in delta.items() if key != "role")
