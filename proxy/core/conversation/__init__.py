"""What a request says: items, rounds, places, the chain; one dialect per API."""
