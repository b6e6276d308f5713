"""Defers tools that no window has room for behind one tool that finds them."""
