"""Exchanges the page's figures between workers: each answers the others on a Unix socket in the folder that they share.

A question is one line of JSON. The answer is everything up to the end of the stream: ``Changes`` or ``Detail``.
Questions come only while a page is open. Only the proxy's user can read the folder, which is that of the metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from proxy.page.board import Board, Changes, Detail

ANSWER_SECONDS: Final = 1.0
"""Seconds that a worker has to answer; if it hangs, the page is shown without it."""

MOST_BYTES: Final = 64 * 2**20
"""Bytes of an answer that are buffered. It is no limit: an answer is read to its end."""

T = TypeVar("T")


class Question(msgspec.Struct, omit_defaults=True):
    """A question: the changes since a version, or one conversation if ``name`` is set."""

    since: int = 0
    name: str = ""


_QUESTION: Final = msgspec.json.Decoder(Question)


class WorkerSocket:
    """Answers the other workers about this one's *board*; ``others`` are the sockets of those."""

    def __init__(self, board: Board, folder: Path, index: int, count: int) -> None:
        self._board = board
        self._path = folder / f"page-{index}.sock"
        self.others: Sequence[Path] = [folder / f"page-{other}.sock" for other in range(count) if other != index]
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises ``OSError`` if the folder's path is too long for a socket."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, self._path)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = _QUESTION.decode(await asyncio.wait_for(reader.readline(), ANSWER_SECONDS))
            self._board.update()
            answer: Changes | Detail | None = self._board.changes(question.since)
            if question.name:
                answer = self._board.detail(question.name)
            writer.write(msgspec.json.encode(answer))
            await asyncio.wait_for(writer.drain(), ANSWER_SECONDS)
        except (OSError, TimeoutError, msgspec.DecodeError):
            pass  # the other worker has ended, or was too slow
        finally:
            writer.close()


async def ask(path: Path, question: Question, kind: type[T]) -> T | None:
    """Return the answer of the worker at *path*, None if it does not answer in time."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path, limit=MOST_BYTES)
            try:
                writer.write(msgspec.json.encode(question) + b"\n")
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    try:
        return msgspec.json.decode(answer, type=kind | None)
    except msgspec.DecodeError:
        return None
