"""Examples that can be run from a clone."""
