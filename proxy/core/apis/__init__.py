"""What is known of the three APIs: their items, their bodies and their streams."""
