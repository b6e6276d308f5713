"""Whole journeys: a real client, a real proxy process, a strict upstream."""
