"""The errors that Ullage answers with: facts and an HTTP status. ``error_body`` renders them in an API's own format."""

from __future__ import annotations

import json


class UllageError(Exception):
    """An error that Ullage itself answers with: its HTTP ``status``, and ``code``, a stable machine-readable name.

    ``text`` is its message if it is raised without one.
    """

    status = 500
    code = "internal_error"
    kind = "server_error"
    text = "Ullage failed to handle this request."

    @property
    def message(self) -> str:
        """One sentence for the caller: the problem, its place, and a remedy."""
        return str(self) or self.text


class InvalidRequest(UllageError):
    """The body or a header cannot be accepted as it stands."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class Unauthorized(UllageError):
    """No valid credential came with the request."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(UllageError):
    """The caller's credential does not permit this."""

    status = 403
    code = "forbidden"
    kind = "permission_error"


class NotFound(UllageError):
    """No such route, model or object."""

    status = 404
    code = "not_found"
    kind = "invalid_request_error"


class Conflict(UllageError):
    """The request cannot be served with this proxy's configuration."""

    status = 409
    code = "conflict"
    kind = "invalid_request_error"


class RequestTimeout(UllageError):
    """The client did not deliver its request in time."""

    status = 408
    code = "request_timeout"
    kind = "invalid_request_error"


class BodyTooLarge(UllageError):
    """The request body is larger than the proxy accepts; ``limit`` in bytes."""

    status = 413
    code = "request_too_large"
    kind = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes (server.limits.body).")
        self.limit = limit


class TooManyItems(InvalidRequest):
    """The conversation has more items than the proxy accepts, whatever their size; ``limit`` is their number."""

    status = 413
    code = "too_many_items"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request has more than {limit} messages or items (server.limits.items).")
        self.limit = limit


class InflatesTooFar(UllageError):
    """The compressed body unfolds to more than ``limit`` times its size."""

    status = 413
    code = "request_inflates_too_far"
    kind = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The compressed request body unfolds to more than {limit} times its size (server.limits.inflation)."
        )
        self.limit = limit


class Overloaded(UllageError):
    """The proxy is at a configured limit; the caller should retry after ``retry_after`` seconds."""

    status = 503
    code = "overloaded"
    retry_after = 1


class TooManyRequests(UllageError):
    """The caller sends the proxy itself too many requests; it should retry after ``retry_after`` seconds."""

    status = 429
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"
    retry_after = 1


class StoreUnavailable(UllageError):
    """The request needs the store, which does not answer."""

    status = 503
    code = "store_unavailable"
    text = "The store does not answer, so conversations cannot be shown now. Model calls go on without it."


class OtherVersion(StoreUnavailable):
    """The stored value was written by another version of Ullage and may have more fields, so it is not overwritten."""

    text = "Another version of Ullage stored this, so it can be neither read nor changed here. Model calls go on."

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version


class UpstreamError(UllageError):
    """An upstream is the reason; ``upstream`` is its configured name."""

    upstream: str


class UpstreamUnreachable(UpstreamError):
    """The upstream gave no answer."""

    status = 502
    code = "upstream_unreachable"

    def __init__(self, upstream: str, cause: str) -> None:
        super().__init__(f"The upstream {upstream!r} could not be reached: {cause}.")
        self.upstream = upstream
        self.cause = cause


class UpstreamTimeout(UpstreamError):
    """The upstream accepted the request and sent nothing, or did not end its answer, for ``seconds``."""

    status = 504
    code = "upstream_timeout"

    def __init__(self, upstream: str, seconds: float, *, endless: bool = False) -> None:
        fault = "sent nothing for"
        if endless:
            fault = "did not end its answer within"
        super().__init__(f"The upstream {upstream!r} {fault} {seconds:.0f} s.")
        self.upstream = upstream
        self.seconds = seconds


OUTPUT = "output figure"
"""The region named as the largest if a request reserves most of the window for its answer."""


class ContextTooLong(UllageError):
    """The part that may not be shrunk is larger than the budget.

    ``tokens`` is the smallest input that compaction can reach, ``limit`` the model's window, ``reserve`` the output
    allowance; ``largest`` names the region with the most tokens.
    """

    status = 400
    code = "context_length_exceeded"
    kind = "invalid_request_error"

    def __init__(self, *, tokens: int, limit: int, reserve: int, largest: str, largest_tokens: int) -> None:
        alone = f"the {largest} alone take {largest_tokens} tokens and may not be shrunk"
        remedy = f"Please shorten the {largest}."
        if largest == OUTPUT:
            alone = f"the {largest} alone takes {largest_tokens} tokens"
            remedy = f"Please lower the {largest}."
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, after compression this request still "
            f"needs {tokens} tokens of input and {reserve} of output, {self.excess(tokens, limit, reserve)} too many; "
            f"{alone}. {remedy}"
        )
        # The beginnings are the providers' own: clients recognise an overflow by them.
        # https://platform.claude.com/docs/en/build-with-claude/context-windows
        head = f"prompt is too long: {tokens} tokens > {limit} maximum"
        if tokens <= limit:
            head = f"input length and `max_tokens` exceed context limit: {tokens} + {reserve} > {limit}"
        self.anthropic = f"{head} (after compression; {alone}). {remedy}"
        self.google = (
            f"The input token count ({tokens}) exceeds the maximum number of tokens allowed ({limit}), of which "
            f"{reserve} are for the answer, also after compression; {alone}. {remedy}"
        )
        self.tokens = tokens
        self.limit = limit
        self.reserve = reserve
        self.largest = largest
        self.largest_tokens = largest_tokens

    @staticmethod
    def excess(tokens: int, limit: int, reserve: int) -> int:
        """Return the number of tokens by which the request is too large."""
        return max(1, tokens + reserve - limit)


class StoredHistoryTooLong(UpstreamError):
    """*upstream* has refused the history that it stores before, and this request is no shorter."""

    status = 400
    code = "context_length_exceeded"
    kind = "invalid_request_error"
    text = (
        "The upstream stores this conversation, and has refused it as longer than its context window: leave out "
        "previous_response_id or conversation and send the messages themselves as input, which can be compacted, or "
        "set truncation to auto."
    )

    def __init__(self, upstream: str) -> None:
        super().__init__()
        self.upstream = upstream


ANTHROPIC_KINDS = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status; OpenAI's names for the others are the same.
https://platform.claude.com/docs/en/api/errors"""

GOOGLE_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Google's names of errors by status; any other error is the request's, an ``INVALID_ARGUMENT``.
https://cloud.google.com/apis/design/errors#handling_errors"""


def error_body(error: UllageError, api: str) -> bytes:
    """Return the JSON body of *error* in the shape of *api*: Anthropic's, Google's, or OpenAI's for all others."""
    if api == "messages":
        return json.dumps(_anthropic_error(error)).encode()
    if api == "gemini":
        return json.dumps(_google_error(error)).encode()
    member = None
    if isinstance(error, ContextTooLong):
        member = {"responses": "input"}.get(api, "messages")
    fields = {"message": error.message, "type": error.kind, "param": member, "code": error.code}
    return json.dumps({"error": fields}).encode()


def _google_error(error: UllageError) -> dict[str, object]:
    message = error.message
    if isinstance(error, ContextTooLong):
        message = error.google
    status = GOOGLE_STATUSES.get(error.status, "INVALID_ARGUMENT")
    return {"error": {"code": error.status, "message": message, "status": status}}


def _anthropic_error(error: UllageError) -> dict[str, object]:
    message = error.message
    if isinstance(error, ContextTooLong):
        message = error.anthropic
    kind = ANTHROPIC_KINDS.get(error.status, error.kind)
    return {"type": "error", "error": {"type": kind, "message": message}}
