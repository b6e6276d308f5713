"""Names of HTTP headers, in lower case, that several rooms have to agree on."""

from __future__ import annotations

from typing import Final

OWN_PREFIX: Final = "x-ullage-"
"""What the names of Ullage's own headers begin with: they go no further than to the proxy, or back to the client."""

CREDENTIAL_ORDER: Final = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Headers in which callers send a key: OpenAI's, Anthropic's, Azure's and Google's.

In this order for ever: a tenant's digest goes by it, and under another one tenants would lose their conversations.
"""

CREDENTIALS: Final = frozenset(CREDENTIAL_ORDER)

PERSONAL: Final = CREDENTIALS | {"cookie", "openai-organization", "openai-project"}
"""Headers that say who a client is: not for a server that the client does not know of."""

HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that are meant for one connection (https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1)."""

WRITTEN_ANEW: Final = frozenset({"content-length", "host"})
"""Headers of a request that depend on where it is sent and how: each sender writes its own."""
