"""Keeps what a project's conversations should know of each other, and gives it to new ones once."""
