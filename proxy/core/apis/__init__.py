"""The APIs: their items, bodies and streams."""
