"""Writing, finding, reading and keeping checkpoints."""
