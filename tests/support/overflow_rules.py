"""The packaged rules about overflows without those that come from some providers, to judge errors that are new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def without_sources(data: Mapping[str, Any], left_out: Iterable[str]) -> dict[str, Any]:
    """*data* without the rules that come from *left_out* alone. Plain words of the language stay."""
    names = {name.lower() for name in left_out}

    def stays(row: Any) -> bool:
        sources = [source.strip().lower() for source in str(row["source"]).split(",")]
        return not all(any(name in source for name in names) for source in sources)

    result = dict(data)
    for key in ("terms", "noise", "codes", "stops", "fields", "rules", "figures"):
        if key in data:
            result[key] = [row for row in data[key] if stays(row)]
    return result
