"""Applies the context edits of the Messages API for upstreams that do not know them."""
