"""Looks at a running proxy from outside: its processes, its log, its metrics."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy, until


def processes_below(home: Path | None) -> dict[int, str]:
    """Processes that work below *home*, by id: the proxy and its workers, with their commands."""
    return {pid: command for pid, command in _processes() if _works_below(pid, str(home))}


async def until_gone(home: Path | None, seconds: float = 60.0) -> None:
    """Return once no process works below *home*."""
    try:
        await until(lambda: not processes_below(home), seconds)
    except TimeoutError:
        raise AssertionError(f"left over: {processes_below(home)}") from None


def kill_all(home: Path | None) -> None:
    """End what still works below *home*."""
    for pid in processes_below(home):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def log_lines(front: Proxy) -> list[dict[str, Any]]:
    """The JSON lines of the proxy's log, in order."""
    return [json.loads(line) for line in front.log.read_text().splitlines() if line.startswith("{")]


def request_lines(front: Proxy) -> list[dict[str, Any]]:
    """The line of each finished request."""
    return [line for line in log_lines(front) if line["event"] == "proxy.request_done"]


def worker_pids(front: Proxy) -> dict[int, int]:
    """The newest process id of each worker by its index, as the log tells."""
    return {line["worker"]: line["pid"] for line in log_lines(front) if line["event"] == "worker.started"}


async def metrics(front: Proxy) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The figures of ``/metrics`` by name and labels."""
    async with loopback_client() as client:
        text = (await client.get(f"{front.root}/metrics")).text
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def status(front: Proxy) -> dict[str, Any]:
    """What ``/ullage/api/status`` tells on loopback."""
    async with loopback_client() as client:
        answer: dict[str, Any] = (await client.get(f"{front.root}/ullage/api/status")).json()
    return answer


def total(figures: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """The sum of *name* over all samples that carry *labels*."""
    wanted = set(labels.items())
    return sum(value for (sample, labels), value in figures.items() if sample == name and wanted <= labels)


def _processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _works_below(pid: int, home: str) -> bool:
    # A zombie has no working directory, and nothing is left of it but its number.
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd").startswith(home)
    return False
