"""Optional outputs of requests' reports beside the log line and the metrics: the budget log, and traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proxy.core.report import Report, SummaryReport
from proxy.engine.ports import Exchange, Upstream
from proxy.telemetry.budget_log import BudgetLog

if TYPE_CHECKING:
    from proxy.telemetry.tracing import Tracing


class CannotExport(Exception):
    """A configured output cannot be written; the text names the setting, the reason and the remedy."""


class Exports(msgspec.Struct, frozen=True):
    """The configured outputs. ``close`` ends them."""

    budget_log: BudgetLog | None = None
    tracing: Tracing | None = None

    @property
    def observers(self) -> tuple[Callable[[Report, float], None], ...]:
        """Functions that are called with each request's report and its seconds."""
        outputs = (self.budget_log, self.tracing)
        return tuple(output.observe for output in outputs if output is not None)

    def traced_upstream(self, upstream: Upstream) -> Upstream:
        """Return *upstream* with its calls traced, if traces are on."""
        if self.tracing is None:
            return upstream
        from proxy.telemetry.tracing import TracedUpstream

        return TracedUpstream(upstream, self.tracing)

    def traced_exchange(self, engine: Exchange) -> Exchange:
        """Return *engine* with its requests traced, if traces are on."""
        if self.tracing is None:
            return engine
        from proxy.telemetry.tracing import TracedExchange

        return TracedExchange(engine, self.tracing)

    def summary(self, report: SummaryReport) -> None:
        """Trace a summary job that has ended. Call it in the job's task, whose context names the request."""
        if self.tracing is not None:
            self.tracing.summary(report)

    def close(self) -> int:
        """Write and send everything that waits. Return the number of lines not written since the start."""
        if self.tracing is not None:
            self.tracing.close()
        if self.budget_log is None:
            return 0
        self.budget_log.close()
        return self.budget_log.dropped


NO_EXPORTS = Exports()


def open_budget_log(path: Path | None, max_bytes: int, files: int, worker: int) -> BudgetLog | None:
    """Return the budget log at *path*; None without one. Raises ``CannotExport``.

    A *worker* other than the first (0) has a file of its own, because a rotated file has one writer:
    https://docs.python.org/3/howto/logging-cookbook.html#logging-to-a-single-file-from-multiple-processes
    """
    if path is None:
        return None
    if worker:
        path = path.with_name(f"{path.stem}-{worker}{path.suffix}")
    try:
        return BudgetLog(path, max_bytes, files)
    except OSError as error:
        problem = f"telemetry.budget_log.path: {path}: {error.strerror or error}"
        raise CannotExport(f"{problem}. Name a file in a folder that this process may write to.") from error


def open_traces(version: str) -> Tracing | None:
    """Return traces as the ``OTEL_*`` variables configure them, None if these disable them.

    Raises ``CannotExport`` without the library.
    """
    try:
        # Imported only if traces are on: the library is an extra, and takes a fifth of a second to import.
        from proxy.telemetry.tracing import open_tracing
    except ImportError as error:
        raise CannotExport("telemetry.traces needs OpenTelemetry: pip install 'ullage[otel]'") from error
    return open_tracing(version)
