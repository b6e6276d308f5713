"""Is this response a context overflow, of which kind, and what does it state."""
