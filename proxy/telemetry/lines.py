"""Writing lines without ever waiting for whoever reads them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from select import PIPE_BUF

MOST_BYTES = 4 * 1024 * 1024
# One wake-up of the writing thread per batch, not per line: a wake-up costs more than rendering the line.
BATCH_SECONDS = 0.02


class LineWriter:
    """Lines for a file descriptor, written by a thread of its own.

    ``write`` never blocks: when the reader is gone or stuck and *most_bytes* wait, further lines are dropped and
    counted in ``dropped``. Safe to call from any thread.
    """

    def __init__(self, fd: int, most_bytes: int = MOST_BYTES) -> None:
        self.dropped = 0
        self._fd = fd
        self._most = most_bytes
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Take *line* (with its line end) for writing, or drop it."""
        with self._lock:
            if self._size + len(line) > self._most:
                self.dropped += 1
                return
            self._size += len(line)
            self._waiting.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, seconds: float = 1.0) -> None:
        """Write what is left, waiting at most *seconds*."""
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()
            lines = self._take()
            if not all(map(self._put, _pieces(lines))) or closing:
                return
            if lines:
                self._closing.wait(BATCH_SECONDS)

    def _take(self) -> list[bytes]:
        with self._lock:
            lines = list(self._waiting)
            self._waiting.clear()
            return lines

    def _put(self, piece: bytes) -> bool:
        rest = memoryview(piece)
        while rest:
            try:
                written = os.write(self._fd, rest)
            except BlockingIOError:
                # Somebody who shares the pipe made it non-blocking; it has to drain first.
                time.sleep(BATCH_SECONDS)
                continue
            except OSError:
                # The reader is gone for good. From here on every line counts as dropped.
                with self._lock:
                    self.dropped += 1
                    self._most = 0
                return False
            rest = rest[written:]
            with self._lock:
                self._size -= written
        return True


def _pieces(lines: list[bytes]) -> Iterator[bytes]:
    """*lines* joined into writes that a pipe takes whole: workers share one, and larger writes would interleave."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if size + len(line) > PIPE_BUF and piece:
            yield b"".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield b"".join(piece)
