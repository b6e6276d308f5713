"""The engine: plans a request, sends it, and learns from the answer."""
