"""Answers compactions that clients ask for."""
