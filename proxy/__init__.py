"""Ullage: an OpenAI-compatible reverse proxy that keeps every conversation inside the model's window."""


def version() -> str:
    """Return the installed version; ``0+source`` in a checkout that is not installed."""
    # Only here: nothing else of this package should cost a start the import of the metadata's reader.
    import importlib.metadata

    try:
        return importlib.metadata.version("ullage")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
