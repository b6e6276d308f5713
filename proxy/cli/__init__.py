"""The command line: ``commands`` defines every command, the other modules implement them."""

import sys

import proxy


def _clash() -> str:
    """Return which other distribution replaced files of this package, and the remedy."""
    # Imported here only: it reads the list of files of every installed distribution.
    from importlib.metadata import packages_distributions

    others = sorted(set(packages_distributions().get("proxy", ())) - {"ullage"})
    return (
        f"ullage: {proxy.__file__} is not Ullage's: {', '.join(others) or 'something else'} installs a package "
        "'proxy' too. Install Ullage in a virtual environment of its own, or with pipx or uv tool."
    )


if not hasattr(proxy, "version"):
    sys.exit(_clash())

from proxy.garbage import without_collections  # noqa: E402 - it may have been replaced, too

with without_collections():
    from proxy.cli.commands import app, main

__all__ = ["app", "main"]
