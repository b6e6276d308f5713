"""Splits an error answer of any format into its texts, its codes, and the figures in its members."""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

MOST_TEXTS, MOST_CHARACTERS, DEEPEST = 60, 24_000, 20
"""Texts of an answer that are read, characters of all of them together, and levels of nesting: errors are short, but a
validation error may repeat a whole conversation."""

MOST_ELEMENTS, MOST_MEMBERS = 40, 60
"""Elements of a list and members of an object that are read: a validation error has one element for each fault."""

MOST_EMBEDDED = 8
"""Attempts to decode JSON inside one text: gateways put a provider's error into a text of their own."""

ECHOES = frozenset(
    {
        "choices", "doc_url", "documentation_url", "examples", "id", "input", "messages", "model", "more_info",
        "prompt", "provider_name", "request", "request_body", "request_id", "requestid", "stack", "stacktrace", "trace",
        "traceback", "url", "usage", "help", "user_id",
    }
)  # fmt: skip
"""Members that repeat the request or refer to something else: they say nothing about the error."""

NAMING = frozenset(
    {"code", "type", "reason", "status", "status_code", "error_type", "error_code", "errorcode", "__type", "kind"}
)
"""Members that hold machine-readable codes."""

_EVENT_ERRORS = frozenset({":exception-type", ":error-code"})
"""Headers of a frame that reports an error in an AWS event stream: https://smithy.io/2.0/aws/amazon-eventstream.html"""

_ERROR_MEMBERS = ("error_code", "error_msg", "error_message", "errorCode", "errorMessage", "errcode", "errmsg")
"""Members that only errors have, of vendors that answer them with 200.

Baidu: https://ai.baidu.com/ai-doc/WENXINWORKSHOP/tlmyncueh
"""

_AT_FAULT = ("loc", "param", "field", "path", "propertyName")
"""Members that name a member of the request: of FastAPI, OpenAI, GitHub, express-validator, and FluentValidation.

https://docs.github.com/en/rest/using-the-rest-api/troubleshooting-the-rest-api#validation-failed
https://express-validator.github.io/docs/api/validation-result/#error-types
https://docs.fluentvalidation.net/en/latest/error-codes.html
"""

_MEMBER = re.compile(r"[^\s/]+\Z")
_SAYING = NAMING | {"message", "msg", "detail", "details", "description", "title", "error", "base", "text"}
"""Members that say what is wrong, and name nothing of the request."""

_NAMED_MEMBER = re.compile(
    r"[\"'`]([a-z_]\w{0,60}(?:[.\[][\w.\[\]]{0,120})?)[\"'`]: (?:string|array) too (?:long|large)|#/(\w[\w/]{0,120})"
    r"|\A([A-Za-z_]\w{0,60}\[\d{1,5}\][\w.\[\]]{0,120})(?=[\s:])"
)
_PYTHON = re.compile(r"[\[{]{1,2}'\w{1,40}':")
_STRAY_ESCAPE = re.compile(r"(?:(?<=[^\\])|^)(?:\\\\)*\\(?=[^\\'\"\nabfnrtvxuUN0-7]|[4-7][0-7]{2})")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TAG = re.compile(r"<(?:script|style)\b[^<]{0,2000}<|<[^<>]{0,500}>", re.IGNORECASE)
_IDENTIFIER = re.compile(r"[A-Za-z][\w.:#-]{2,80}\Z|\d{3,6}\Z")


@dataclass(slots=True)
class ErrorParts:
    """The parts of an error answer. ``member_at_fault`` names a member of the request; empty if unknown.

    ``embedded_codes`` are those in JSON inside a text: of a provider behind a gateway, or of an error that the request
    quotes.
    """

    texts: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    embedded_codes: list[str] = field(default_factory=list)
    members: list[tuple[str, int]] = field(default_factory=list)
    member_at_fault: str = ""
    _room: int = MOST_CHARACTERS

    def add(self, text: str) -> None:
        """Add *text* while there is room: as a code if it is one word, else as a text."""
        text = text.strip()
        if _IDENTIFIER.match(text):
            if len(self.codes) < MOST_TEXTS:
                self.codes.append(text)
            return
        if not text or self._room <= 0 or len(self.texts) >= MOST_TEXTS:
            return
        text = text[: self._room]
        if text not in self.texts:
            self.texts.append(text)
            self._room -= len(text)
        if not self.member_at_fault and (named := _NAMED_MEMBER.search(text)):
            self.member_at_fault = (named[1] or named[2] or named[3]).replace("/", ".")


def parse_body(body: bytes) -> Any:
    """Return the JSON value in *body*, else its text."""
    text = body.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if text[:1] in ("{", "[", '"'):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def is_error(value: Any) -> bool:
    """True if a decoded answer has the shape of an error, whatever its status is."""
    if isinstance(value, list):
        return bool(value) and is_error(value[0])
    if not isinstance(value, dict):
        return False
    if value.get("error") or value.get("type") == "error" or value.get("object") == "error":
        return True
    if _holds_error(value):
        return True
    if value.get("choices") or value.get("content"):
        return False
    return bool(value.get("detail") or value.get("errors")) or _is_failure(value)


def _holds_error(value: dict[Any, Any]) -> bool:
    """True if the response in an event or answer is an error, or the frame of an AWS event stream reports one."""
    response = value.get("response") or value.get("Response")
    if isinstance(response, dict) and (response.get("error") or response.get("Error")):
        return True
    headers = value.get("headers")
    return isinstance(headers, dict) and not _EVENT_ERRORS.isdisjoint(headers)


def _is_failure(value: dict[Any, Any]) -> bool:
    """True if an object without an answer has an error code of its own, and a text or members that only errors have.

    MiniMax: https://platform.minimax.io/docs/api-reference/errorcode
    """
    base = value.get("base_resp")
    if isinstance(base, dict) and base.get("status_code"):
        return True
    if any(value.get(name) for name in _ERROR_MEMBERS):
        return True
    return bool(value.get("code")) and isinstance(value.get("message") or value.get("msg"), str)


STATED_STATUSES: Final[tuple[tuple[int, frozenset[str]], ...]] = (
    (429, frozenset({"ratelimit", "throttl", "toomanyrequests", "quota", "resourceexhausted"})),
    (503, frozenset({"overload", "unavailable", "servererror", "internalerror", "apierror", "timeout", "internal"})),
)
"""Statuses by parts of the codes that an error in a stream has instead of a status; lower case, without separators.

OpenAI: https://platform.openai.com/docs/guides/error-codes
Anthropic: https://platform.claude.com/docs/en/api/errors
Google: https://ai.google.dev/gemini-api/docs/troubleshooting
"""


def stated_status(value: Any) -> int:
    """Return the status (400 to 599) that a decoded error inside a 200 states; 200 if it states none."""
    while isinstance(value, list):
        value = value[0]
    error, response = value.get("error"), value.get("response")
    if isinstance(response, dict):
        # A failed response repeats its request, in which nothing is a code: only its error is read.
        error = response.get("error") or error
    parts = error_parts(error or value)
    codes = [*parts.codes, *parts.embedded_codes]
    stated = (int(code) for code in codes if code.isdecimal() and 400 <= int(code) <= 599)
    return next(stated, None) or _status_by_name("\n".join(codes))


def _status_by_name(codes: str) -> int:
    names = re.sub(r"[^a-z\n]", "", codes.lower())
    for status, stems in STATED_STATUSES:
        if any(stem in names for stem in stems):
            return status
    return 200


def error_parts(value: Any) -> ErrorParts:
    """Return the parts of a decoded answer, and of the JSON inside its strings, several levels deep."""
    parts = ErrorParts()
    _walk(value, "", parts, DEEPEST)
    return parts


def _walk(value: Any, name: str, parts: ErrorParts, depth: int) -> None:
    if depth <= 0:
        return
    if isinstance(value, str):
        _text(value, parts, depth)
    elif isinstance(value, dict):
        _object(value, name, parts, depth)
    elif isinstance(value, list | tuple):
        for member in value[:MOST_ELEMENTS]:
            _walk(member, "", parts, depth - 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        parts.members.append((_CAMEL.sub("_", name).lower(), value))
        if name.lower() in NAMING:
            parts.codes.append(str(value))


def _object(value: dict[Any, Any], holder: str, parts: ErrorParts, depth: int) -> None:
    if not parts.member_at_fault:
        parts.member_at_fault = _named_member(value)
    for key, member in list(value.items())[:MOST_MEMBERS]:
        name = str(key).lower()
        if holder == "errors" and _are_texts(member) and name not in _SAYING:
            parts.member_at_fault = parts.member_at_fault or str(key)
            _walk(member, "", parts, depth - 1)
            continue
        if _is_echo(name, member) or (name == "loc" and isinstance(member, list | tuple)) or name == "param":
            continue
        _walk(member, str(key), parts, depth - 1)


def _named_member(value: dict[Any, Any]) -> str:
    """The member of the request that the error object *value* names; empty if it names none."""
    named = next((value[name] for name in _AT_FAULT if value.get(name)), "")
    if isinstance(named, list | tuple):
        path = list(map(str, named))
        if path[:1] == ["body"]:  # FastAPI's, which is not the member's name
            del path[0]
        return ".".join(path)
    if isinstance(named, str) and _MEMBER.match(named) and named.lower() not in ("none", "null"):
        return named
    return ""


def _is_echo(name: str, member: Any) -> bool:
    """True if *member* of this *name* repeats the request; messages of errors have no role."""
    if name not in ECHOES:
        return False
    if name != "messages" or not isinstance(member, list):
        return True
    return any(not isinstance(message, dict) or "role" in message for message in member)


def _are_texts(value: Any) -> bool:
    """True if *value* is a text or some: in an object of ``errors``, what is wrong with the member of that name.

    Laravel: https://laravel.com/docs/validation#validation-error-response-format
    Rails: https://guides.rubyonrails.org/active_record_validations.html#working-with-validation-errors
    """
    if isinstance(value, list):
        return bool(value) and all(isinstance(text, str) for text in value)
    return isinstance(value, str)


def _text(text: str, parts: ErrorParts, depth: int) -> None:
    text = text[:MOST_CHARACTERS]
    if "</" in text or text.startswith("<!"):
        text = html.unescape(_TAG.sub(" ", text))
    for piece in _pieces(text):
        if isinstance(piece, str):
            parts.add(piece)
        else:
            _walk_embedded(piece, parts, depth - 1)


def _walk_embedded(value: Any, parts: ErrorParts, depth: int) -> None:
    before = len(parts.codes)
    _walk(value, "", parts, depth)
    parts.embedded_codes += parts.codes[before:]
    del parts.codes[before:]


def _pieces(text: str) -> Iterator[Any]:
    """Yield the parts of *text* in order: JSON objects and lists as values, the rest as texts."""
    decoder, tries = json.JSONDecoder(), 0
    at = start = 0
    while tries < MOST_EMBEDDED and (at := _next_bracket(text, at)) >= 0:
        tries += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = _python_literal(text, at)
        if value is None:
            at += 1
            continue
        if value and not _is_list_of_figures(value):
            yield text[start:at]
            yield value
            start = end
        at = end
    yield text[start:]


def _python_literal(text: str, at: int) -> tuple[Any, int]:
    """The list or object that Python wrote into *text* at the index *at*, and where it ends; None if there is none.

    Servers in Python put the errors of a validation into a sentence so: https://docs.pydantic.dev/latest/errors/errors/
    """
    end = max(text.rfind("]"), text.rfind("}")) + 1
    if end <= at or not _PYTHON.match(text, at):
        return None, at
    try:
        return ast.literal_eval(_STRAY_ESCAPE.sub(r"\\\g<0>", text[at:end])), end
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None, at


def _is_list_of_figures(value: Any) -> bool:
    """True if *value* is a list that begins with an integer, such as a range in a sentence."""
    return isinstance(value, list) and isinstance(value[0], int)


def _next_bracket(text: str, at: int) -> int:
    """Return the index of the next opening bracket or brace from *at* on, -1 if there is none."""
    indexes = [index for index in (text.find("{", at), text.find("[", at)) if index >= 0]
    return min(indexes, default=-1)
