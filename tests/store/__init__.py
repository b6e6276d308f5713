"""Tests of the store, against real servers."""
