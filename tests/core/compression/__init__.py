"""Tests of what makes a view smaller."""
