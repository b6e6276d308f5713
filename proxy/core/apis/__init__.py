"""The three APIs: reading their requests, editing them, and the JSON underneath."""
