"""The command line: ``commands`` defines every command, the other modules hold what one of them does."""

from proxy.cli.commands import app, main

__all__ = ["app", "main"]
