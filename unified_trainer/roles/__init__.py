"""A model plus what may be done to its weights."""
