"""The name of a model in a relayed JSON body: found as its server would find it, and exchanged where it is an alias."""

from __future__ import annotations

import json

from proxy.core.apis.json_scan import members


def renamed(body: bytes, name: str) -> bytes:
    """The JSON object *body* with *name* for its model, every other byte as it is; *body* where there is none.

    Of a member that occurs twice the last one counts, as parsers have it.
    """
    try:
        text = body.decode()
        field = next((each for each in reversed(members(text)) if each.key == "model"), None)
    except (ValueError, RecursionError):
        return body
    if field is None:
        return body
    return b"".join([text[: field.start].encode(), json.dumps(name).encode(), text[field.end :].encode()])
