"""What the engine leads a request through: reading, fitting, sending, and learning from what comes back."""
