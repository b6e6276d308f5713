"""Optional behaviours, one folder each. Nothing but the wiring imports them, and each folder can be deleted."""
