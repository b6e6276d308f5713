"""Defers tools for which the window has no room: a search tool in their place declares those that it finds."""
