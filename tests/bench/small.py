"""``ullage`` with small caches: filling those it has takes hours, and what grows until then looks like a leak.

``python -m tests.bench.small PYTHON -m proxy.cli ARGUMENTS``: runs the command line in this process.
"""

from __future__ import annotations

import sys
from types import ModuleType

from proxy import caches, cli, upstream_wiring, wiring
from proxy.engine import features, records
from proxy.features.history import feature as history
from proxy.server import rate_limit
from proxy.store import encryption, tables

SHARE = 64
"""By which the caches are smaller."""


BOUNDS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (caches, ("ITEM_BYTES", "PREFIX_BYTES", "ENVELOPE_BYTES", "RECORD_BYTES", "TEXT_BYTES")),
    (wiring, ("CACHED_SIZES", "CACHED_LOOKUPS", "CACHED_ROUTES")),
    (upstream_wiring, ("CACHED_TENANTS", "CACHED_STRETCHES")),
    (tables, ("_RENEWED", "_REQUESTS")),
    (encryption, ("_TENANTS",)),
    (records, ("NEED_NO_SUMMARY",)),
    (features, ("MOST_NOTED",)),
    (history, ("ARCHIVED_ITEMS", "RECENT_NOTES")),
    (rate_limit, ("MAX_CALLERS",)),
)
"""The bounds of everything a process remembers of its clients, by the module that reads them."""


def main() -> None:
    """Shrink the caches, then run the command line."""
    for module, names in BOUNDS:
        for name in names:
            setattr(module, name, getattr(module, name) // SHARE)
    sys.argv = ["ullage", *sys.argv[sys.argv.index("proxy.cli") + 1 :]]
    cli.main()


if __name__ == "__main__":
    main()
