"""What a text states that may be wrong: paths, addresses, identifiers and figures, by rules of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ENTITY = re.compile(
    r"https?://[^\s\"'<>,)\]}]+"  # addresses
    r"|\d{3,}"  # figures
    r"|[\w.@-]*/[\w./@-]+"  # paths
    r"|[A-Za-z]\w*_\w+"  # identifiers with an underscore
    r"|[a-z]+[A-Z]\w+"  # and with a hump
    r"|\b\w+\.[a-z]{1,4}\b"  # file names
)


def entities(text: str) -> set[str]:
    """Every path, URL, identifier, file name and number of three digits or more in *text*."""
    return {match.group().rstrip(".,:;") for match in _ENTITY.finditer(text)}


def invented(text: str, messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """The entities of *text* that do not occur in *messages*."""
    known_text = "\n".join(piece for message in messages for piece in _strings(message))
    return {name for name in entities(text) if name not in known_text}


def _strings(value: Any) -> Iterator[str]:
    """Every string in *value*, arguments of calls also as what they decode to."""
    if isinstance(value, str):
        yield value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if value[:1] in ("{", "["):
            try:
                yield from _strings(json.loads(value, parse_int=str, parse_float=str))
            except ValueError:
                return
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
