"""Reading requests in O(new): what was seen before is recognised by content and never parsed or counted again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from proxy.core.conversation.dialect import Dialect
from proxy.core.conversation.items import Item
from proxy.core.conversation.outline import Outline, read_outline
from proxy.core.conversation.scan import Scan, extend, scan
from proxy.ports import Counter

INLINE = 16_384
"""Bytes of unseen text that are counted on the event loop (about 3 ms); more goes to a thread."""

PREFIX_FROM = 8_192
"""Bytes from which a body is worth remembering as a whole: below, scanning it again costs as little."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One request, read: where its items are, what they weigh, and what stands around them."""

    body: bytes
    scan: Scan
    items: tuple[Item, ...]
    text: str
    outline: Outline
    fixed: int


@dataclass(frozen=True, slots=True)
class Known:
    """A body seen before up to ``border``: equal bytes up to there (``digest``) mean an equal scan and equal items."""

    border: int
    digest: bytes
    scan: Scan
    items: tuple[Item, ...]


class Reader:
    """Reads bodies with three memories handed in (bounded mappings): items, outlines and whole prefixes.

    Every key is a digest over tenant, encoding and content, so nothing of one tenant can be timed by another, and no
    memory keeps a body alive.
    """

    def __init__(
        self,
        counter: Counter,
        items: MutableMapping[bytes, Item],
        outlines: MutableMapping[bytes, Outline],
        prefixes: MutableMapping[bytes, Known],
    ) -> None:
        self._counter = counter
        self._items = items
        self._outlines = outlines
        self._prefixes = prefixes

    async def read(self, dialect: Dialect, encoding: str, tenant: bytes, body: bytes) -> Reading:
        """The reading of *body*. Raises ``InvalidRequest`` where it is no valid body of *dialect*."""
        scope = hashlib.sha256(tenant + f"{dialect.API}\0{encoding}\0".encode())
        memo = _Memo(scope.copy(), body) if len(body) >= PREFIX_FROM else None
        known = memo.find(self._prefixes) if memo else None
        where = (extend(body, dialect.LIST, known.scan) if known else None) or scan(body, dialect.LIST)
        seen = known.items if known and where.spans[: len(known.items)] == known.scan.spans else ()
        items = seen + await self._read_items(dialect, encoding, scope, body, where.spans[len(seen) :])
        if memo and where.spans:
            memo.keep(self._prefixes, where, items)
        text, outline = self._read_outline(dialect, encoding, scope, where.outline(body))
        system = sum(item.tokens for item in items if item.role == "system")
        return Reading(body, where, items, text, outline, dialect.PER_REPLY + system + outline.fixed)

    def count(self, encoding: str) -> Callable[[str], int]:
        """Counts text in *encoding*."""
        return lambda text: self._counter.count(encoding, text)

    async def _read_items(
        self, dialect: Dialect, encoding: str, scope: hashlib._Hash, body: bytes, spans: tuple[tuple[int, int], ...]
    ) -> tuple[Item, ...]:
        keys = [_key(scope, body[start:end]) for start, end in spans]
        unseen = [index for index, key in enumerate(keys) if key not in self._items]
        if unseen:
            count = self.count(encoding)
            slices = [body[spans[index][0] : spans[index][1]] for index in unseen]

            def read() -> list[Item]:
                return [dialect.read_item(raw, count) for raw in slices]

            large = sum(map(len, slices)) > INLINE
            fresh = dict(
                zip((keys[i] for i in unseen), await asyncio.to_thread(read) if large else read(), strict=True)
            )
            self._items.update(fresh)
            return tuple(fresh.get(key) or self._items[key] for key in keys)
        return tuple(self._items[key] for key in keys)

    def _read_outline(self, dialect: Dialect, encoding: str, scope: hashlib._Hash, raw: bytes) -> tuple[str, Outline]:
        key = _key(scope, raw)
        text = raw.decode()
        outline = self._outlines.get(key)
        if outline is None:
            outline = read_outline(text, dialect.OUTPUT_FIGURES, self.count(encoding))
            self._outlines[key] = outline
        return text, outline


class _Memo:
    """One pass of a hash over a body, which finds the longest known prefix and names the new one.

    A prefix is filed under the digest of its first 2^k bytes, 2^k being at least half of it: conversations that begin
    alike differ there, and a longer body of the same conversation looks at no more than two such names.
    """

    def __init__(self, scope: hashlib._Hash, body: bytes) -> None:
        self._body = memoryview(body)
        self._marks = [(0, scope.copy())]

    def find(self, prefixes: MutableMapping[bytes, Known]) -> Known | None:
        """The longest known prefix whose bytes the body begins with."""
        power = len(self._body).bit_length() - 1
        found: Known | None = None
        for exponent in (power - 1, power):
            candidate = prefixes.get(self._digest(1 << exponent))
            fits = candidate is not None and candidate.border <= len(self._body)
            if candidate and fits and self._digest(candidate.border) == candidate.digest:
                found = candidate
        return found

    def keep(self, prefixes: MutableMapping[bytes, Known], where: Scan, items: tuple[Item, ...]) -> None:
        """File the body up to its last item."""
        border = where.spans[-1][1]
        name = self._digest(1 << (border.bit_length() - 1))
        prefixes[name] = Known(border, self._digest(border), where, items)

    def _digest(self, end: int) -> bytes:
        """The digest of the first *end* bytes, computed from the nearest point reached before."""
        start, mark = max((m for m in self._marks if m[0] <= end), key=lambda m: m[0])
        if start < end:
            mark = mark.copy()
            mark.update(self._body[start:end])
            self._marks.append((end, mark))
        return mark.digest()


def _key(scope: hashlib._Hash, raw: bytes) -> bytes:
    named = scope.copy()
    named.update(raw)
    return named.digest()
