"""The three APIs: their items, bodies and streams."""
