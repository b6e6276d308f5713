"""What reports of requests become beside the log line and the metrics, if it is configured: the budget log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proxy.core.report import Report
from proxy.telemetry.budget_log import BudgetLog


class CannotExport(Exception):
    """Something that is configured cannot be written; the text names the setting, and says why and what to do."""


@dataclass(frozen=True, slots=True)
class Exports:
    """``observers`` get each request's report and its seconds; ``close`` ends them."""

    budget_log: BudgetLog | None = None

    @property
    def observers(self) -> tuple[Callable[[Report, float], None], ...]:
        """Those that are configured."""
        return () if self.budget_log is None else (self.budget_log.observe,)

    def close(self) -> int:
        """Write what waits. Return the number of lines that could not be written since the start."""
        if self.budget_log is None:
            return 0
        self.budget_log.close()
        return self.budget_log.dropped


NO_EXPORTS = Exports()


def open_exports(path: Path | None, max_bytes: int, files: int, worker: int) -> Exports:
    """Return what is configured: the budget log at *path*. Raises ``CannotExport``.

    A *worker* other than the first (0) has a file of its own, because a rotated file has one writer:
    https://docs.python.org/3/howto/logging-cookbook.html#logging-to-a-single-file-from-multiple-processes
    """
    if path is None:
        return Exports()
    if worker:
        path = path.with_name(f"{path.stem}-{worker}{path.suffix}")
    try:
        return Exports(BudgetLog(path, max_bytes, files))
    except OSError as error:
        problem = f"telemetry.budget_log.path: {path}: {error.strerror or error}"
        raise CannotExport(f"{problem}. Name a file in a folder that this process may write to.") from error
