"""``ullage`` whose event loop is looked at every few milliseconds, and that writes down how late it was.

``python -m tests.bench.beat FILE PYTHON -m proxy.cli ARGUMENTS`` runs the command line in this process. FILE gets a
line for each lag of more than ``LEAST`` seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from proxy import app, cli
from proxy.telemetry import lag

BEAT, LEAST = 0.002, 0.003
"""Seconds between two looks, and of the least lag that is written down."""


class ClosestWatch(lag.LagWatch):
    """A watch that also writes each lag to ``file``."""

    file: Path

    def start(self) -> None:
        """Begin to watch, and to write."""
        observe, lags = self._observe, self.file.open("a", buffering=1)

        def written(seconds: float) -> None:
            observe(seconds)
            if seconds > LEAST:
                lags.write(f"{seconds:.4f}\n")

        self._observe = written
        super().start()


def main() -> None:
    """Look more often, then run the command line."""
    ClosestWatch.file = Path(sys.argv[1])
    lag.BEAT = BEAT  # type: ignore[misc]
    app.LagWatch = ClosestWatch  # type: ignore[misc]
    sys.argv = ["ullage", *sys.argv[sys.argv.index("proxy.cli") + 1 :]]
    cli.main()


if __name__ == "__main__":
    main()
