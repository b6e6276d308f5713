"""Names of HTTP headers, in lower case: the one list of them for servers, upstreams, settings and summaries."""

from __future__ import annotations

from typing import Any, Final

OWN_PREFIX: Final = "x-ullage-"
"""The beginning of the names of Ullage's own headers; they never go to an upstream."""

CREDENTIAL_ORDER: Final = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Headers in which callers send a key: OpenAI's, Anthropic's, Azure's and Google's.

The order must never change: a tenant's digest depends on it, and with another digest tenants lose their conversations.
"""

CREDENTIALS: Final = frozenset(CREDENTIAL_ORDER)

PERSONAL: Final = CREDENTIALS | {"cookie", "openai-organization", "openai-project"}
"""Headers that identify a client; they are not sent to a server that the client did not choose."""

HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers for a single connection (https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1)."""

WRITTEN_ANEW: Final = frozenset({"content-length", "host"})
"""Headers of a request that depend on its receiver and its encoding: each sender writes its own."""


class EndToEnd(tuple[tuple[str, str], ...]):
    """A client's end-to-end headers, in order and spelling. They come again with each request that has the same head.

    ``prepared`` is what the upstream that they were last sent to made of them. It is kept as long as they are: a key in
    it stays in memory no longer than in them.
    """

    prepared: Any = None
