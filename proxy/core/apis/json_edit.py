"""Texts inside an item that may be clipped, and how they are replaced: every byte around them stays the client's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from proxy.core.apis.json_scan import Span, elements, members
from proxy.core.apis.json_steps import ONE_CALL, decode, dismantle, encoded, parsed
from proxy.core.errors import InvalidRequest

Path = tuple[str | int, ...]
Count = Callable[[str], int]
Clip = Callable[[str, int], str]

MOST_PARTS = 64
"""Text parts of one content that are clipped one by one. Of more, neighbours become one text, clipped as a whole."""

ATTEMPTS = 3
"""Rounds of clipping: written as JSON, texts may take a few tokens more than they do by themselves."""

_WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ASCII_WRITER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Slot:
    """A text that may be clipped: the path to its member and, if that holds JSON as text, the path inside of it."""

    path: Path
    text: str
    inner: Path | None = None


def quoted(value: Any) -> str:
    """Return *value* as JSON that can be sent as UTF-8; lone surrogates, which cannot, stay escaped."""
    text = _WRITER.encode(value) if isinstance(value, str) else encoded(value, _WRITER.encode)
    try:
        text.encode()
    except UnicodeEncodeError:
        return encoded(value, _ASCII_WRITER.encode)
    return text


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield every text inside a decoded value, with the path to it."""
    stack: list[tuple[Path, Any]] = [(path, value)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, str):
            yield at, node
        elif isinstance(node, dict):
            stack += [((*at, key), member) for key, member in reversed(node.items())]
        elif isinstance(node, list):
            stack += [((*at, index), member) for index, member in reversed(list(enumerate(node)))]


def argument_slots(path: Path, text: str) -> Iterator[Slot]:
    """Yield the texts inside a call's JSON arguments; all of *text* if it is no JSON, which clipping cannot spoil."""
    try:
        value = parsed(text)
    except (ValueError, RecursionError):
        yield Slot(path, text)
        return
    found = [Slot(path, leaf, inner) for inner, leaf in leaves(value)]
    if len(text) > ONE_CALL:
        dismantle(value)
    yield from found


def clipped(
    raw: bytes,
    slots: Callable[[dict[str, Any]], Iterable[Slot]],
    clip: Clip,
    count: Count,
    weigh: Callable[[bytes], int],
    tokens: int,
) -> bytes:
    """Return *raw* cut to about *tokens*, counted by *weigh*, by clipping the longest of its *slots* to one level."""
    raw = with_fewer_parts(raw)
    source = raw.decode()
    value = decode(raw)
    sized = [(slot, count(slot.text)) for slot in slots(value)] if isinstance(value, dict) else []
    if len(raw) > ONE_CALL:
        dismantle(value)
    fixed = weigh(raw) - sum(size for _, size in sized)
    room, result = tokens, raw
    for _ in range(ATTEMPTS):
        cap = level([size for _, size in sized], max(0, room - fixed))
        result = replaced(source, [(slot, clip(slot.text, cap)) for slot, size in sized if size > cap]).encode()
        excess = weigh(result) - tokens
        if excess <= 0 or not cap:
            break  # it fits, or has nothing left to give
        room -= excess
    return result


def with_fewer_parts(raw: bytes) -> bytes:
    """Return *raw* with neighbouring text parts of its content joined by lines, if they are more than ``MOST_PARTS``.

    A part that holds anything beside its type and its text stays as it is, and so does every other byte.
    """
    if raw.count(b'"text"') <= MOST_PARTS:
        return raw
    source = raw.decode()
    fields = [field for field in members(source) if field.key in ("content", "output") and source[field.start] == "["]
    result: list[str] = []
    done = 0
    for field in fields:
        spans, close = elements(source, field.start)
        if len(spans) > MOST_PARTS:
            result += [source[done : field.start + 1], ",".join(_joined_parts(source, spans))]
            done = close
    if not result:
        return raw
    return "".join([*result, source[done:]]).encode()


def _joined_parts(source: str, spans: Sequence[Span]) -> Iterator[str]:
    """Yield the JSON of the parts at *spans*, runs of plain text parts of one type as one part."""
    parts = ((source[start:end], _plain_text(source[start:end])) for start, end in spans)
    for kind, run in groupby(parts, key=lambda part: part[1][0] if part[1] else ""):
        if not kind:
            yield from (text for text, _ in run)
            continue
        words = "\n".join(plain[1] for _, plain in run if plain)
        yield quoted({"type": kind, "text": words})


def _plain_text(part: str) -> tuple[str, str] | None:
    """Return type and text of a part that holds nothing else; None for any other one."""
    value = decode(part.encode())
    if not isinstance(value, dict) or value.keys() != {"type", "text"}:
        return None
    kind, text = value["type"], value["text"]
    return (kind, text) if isinstance(kind, str) and isinstance(text, str) and kind else None


def replaced(source: str, texts: Sequence[tuple[Slot, str]]) -> str:
    """Return the JSON *source* with the texts of these slots replaced and everything around them unchanged."""
    plain = {slot.path: quoted(text) for slot, text in texts if slot.inner is None}
    inside: dict[Path, list[tuple[Path, str]]] = {}
    for slot, text in texts:
        if slot.inner is not None:
            inside.setdefault(slot.path, []).append((slot.inner, quoted(text)))
    spans = dict(locate(source, [*plain, *inside]))
    for path, changes in inside.items():
        start, end = spans[path]
        arguments = json.loads(source[start:end])
        plain[path] = quoted(_spliced(arguments, locate(arguments, [inner for inner, _ in changes]), dict(changes)))
    return _spliced(source, spans.items(), plain)


def locate(source: str, paths: Sequence[Path]) -> Iterator[tuple[Path, Span]]:
    """Yield where the value at each of *paths* begins and ends in the JSON *source*; each level is walked once."""
    stack: list[tuple[int, Span, list[Path]]] = [(0, _whole(source), list(paths))]
    while stack:
        depth, (start, end), wanted = stack.pop()
        deeper: dict[str | int, list[Path]] = {}
        for path in wanted:
            if len(path) == depth:
                yield path, (start, end)
            else:
                deeper.setdefault(path[depth], []).append(path)
        if deeper:
            found = _children(source, start, end)
            stack += [(depth + 1, found[key], below) for key, below in deeper.items()]


def _children(source: str, start: int, end: int) -> Mapping[str | int, Span]:
    """Return where each member or element of the object or list at *start* begins and ends."""
    if source[start] == "{":
        return {field.key: (start + field.start, start + field.end) for field in members(source[start:end])}
    spans, _ = elements(source[start:end], 0)
    return {index: (start + first, start + last) for index, (first, last) in enumerate(spans)}


def level(sizes: Sequence[int], room: int) -> int:
    """Return the largest cap so that the sizes, each cut to it, take at most *room*."""
    ordered = sorted(sizes)
    left = room
    for index, size in enumerate(ordered):
        share = left // (len(ordered) - index)
        if size > share:
            return share
        left -= size
    return ordered[-1] if ordered else 0


def joined(value: str, text: str, kind: str, before: bool, media: Sequence[bytes], more: str = "") -> str:
    """Return the JSON of a content *value* with a text part of *kind* and *media* added before or after its own parts.

    Its own parts stay one unchanged run. *more* are further members of the added part, as JSON.
    """
    open_part = '{"type":"' + kind + '","text":'
    added = ",".join([open_part + quoted(text) + more + "}", *(part.decode() for part in media)])
    if value.startswith("["):
        own = value[1:-1].strip()
    else:
        own = open_part + value + "}" if value.startswith('"') and value != '""' else ""
    return "[" + ",".join(piece for piece in ((added, own) if before else (own, added)) if piece) + "]"


def resaid(
    source: str, texts: Sequence[tuple[Path, str]], kind: str, is_media: Callable[[Mapping[str, Any]], bool] | None
) -> str:
    """Return the JSON *source* with each of *texts* in place of the content at its path, everything else unchanged.

    Parts of which *is_media* holds stay behind the text, which is a part of *kind* then.
    """
    spans = dict(locate(source, [path for path, _ in texts]))
    values = {path: _resaid(source[slice(*spans[path])], text, kind, is_media) for path, text in texts}
    return _spliced(source, spans.items(), values)


def _resaid(value: str, text: str, kind: str, is_media: Callable[[Mapping[str, Any]], bool] | None) -> str:
    if is_media is None or not value.startswith("["):
        return quoted(text)
    parts = [value[start:end] for start, end in elements(value, 0)[0]]
    decoded = [(part.encode(), json.loads(part)) for part in parts]
    media = [part for part, node in decoded if isinstance(node, dict) and is_media(node)]
    return joined("null", text, kind, before=True, media=media) if media else quoted(text)


def grown(value: str, text: str, before: bool) -> str:
    """Return the JSON string *value* with *text* before or after its own, which stays one unchanged run."""
    inner = quoted(text + "\n\n" if before else "\n\n" + text)[1:-1]
    return value[0] + inner + value[1:] if before else value[:-1] + inner + value[-1]


def element(raw: bytes, name: str) -> dict[str, Any]:
    """Return the object of one element's bytes in the list *name*. Raises ``InvalidRequest`` if it is no object."""
    value = decode(raw)
    if not isinstance(value, dict):
        raise InvalidRequest(f"Every element of {name!r} must be an object.")
    return value


def _whole(source: str) -> Span:
    end = len(source.rstrip())
    return len(source) - len(source.lstrip()), end


def _spliced(source: str, spans: Iterable[tuple[Path, Span]], texts: Mapping[Path, str]) -> str:
    pieces: list[str] = []
    done = 0
    for path, (start, end) in sorted(spans, key=lambda found: found[1]):
        pieces += [source[done:start], texts[path]]
        done = end
    return "".join([*pieces, source[done:]])
