"""What a request says: items, rounds, places, the chain; one dialect per API turns bytes into items and edits into bytes."""
