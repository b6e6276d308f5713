"""HTTP in: routes, the LLM handler, auth, limits and deadlines, health, admin."""
