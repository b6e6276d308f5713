"""Answers compactions that clients request."""
