"""Stores facts that the conversations of a project share, and adds them to each new conversation once."""
