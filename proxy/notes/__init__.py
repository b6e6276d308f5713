"""What is written down of conversations for people, and told to their owners; no decision reads it."""
