"""Ullage: an OpenAI-compatible reverse proxy that keeps every conversation inside the model's window."""
