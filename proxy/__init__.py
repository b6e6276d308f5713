"""Ullage: an OpenAI-compatible reverse proxy that keeps every conversation inside the model's window."""

from functools import cache


@cache
def version() -> str:
    """Return the installed version; ``0+source`` in a checkout that is not installed."""
    # Imported here only: no other use of this package needs the reader of metadata, and a start should not wait for it.
    import importlib.metadata

    try:
        return importlib.metadata.version("ullage")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
