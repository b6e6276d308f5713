"""Stores a history of conversations for the people who own them. No decision depends on it."""
