"""Values and decisions. Nothing in here waits, reads a clock, logs or touches the outside world."""
