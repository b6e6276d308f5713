"""Caps tool results before they are first sent."""
