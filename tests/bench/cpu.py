"""CPU time and memory of a process and its Python children, from the kernel's own counters."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def family(pid: int) -> list[int]:
    """*pid* and those of its descendants that run Python: workers count."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                name, _, rest = (folder / "stat").read_text().rpartition(")")
                parents[int(folder.name)] = int(rest.split()[1]), name.partition("(")[2]
    found = [pid]
    for parent in found:
        found += [child for child, (above, name) in parents.items() if above == parent and "python" in name]
    return found


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds that all threads of *pids* have used so far."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in (PROC / str(pid) / "task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def resident_bytes(pids: list[int]) -> int:
    """Bytes of physical memory that *pids* hold, pages they share with others included."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in (PROC / str(pid) / "status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) * 1024
    return total
