"""``ullage`` with small caches: filling those it has takes hours, and what grows until then looks like a leak.

``python -m tests.bench.small PYTHON -m proxy.cli ARGUMENTS``: runs the command line in this process.
"""

from __future__ import annotations

import sys

from proxy import building, cli, memories

SHARE = 64
"""By which the caches are smaller."""


def main() -> None:
    """Shrink the caches, then run the command line."""
    for name in ("PREFIX_BYTES", "OUTLINE_BYTES", "RECORD_BYTES", "TEXT_BYTES"):
        setattr(memories, name, getattr(memories, name) // SHARE)
    for name in ("ITEMS", "SIZES"):
        setattr(building, name, getattr(building, name) // SHARE)
    sys.argv = ["ullage", *sys.argv[sys.argv.index("proxy.cli") + 1 :]]
    cli.main()


if __name__ == "__main__":
    main()
