"""What the server is handed, by shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.core.report import Report

Route = Callable[[str], str]
Observe = Callable[[Report, float], None]
Metrics = Callable[[], tuple[bytes, str]]
Status = Callable[[], Mapping[str, object]]
