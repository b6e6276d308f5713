"""Keeps a history of conversations for the people who own them. No decision reads it."""
