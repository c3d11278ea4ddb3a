"""Parts of the command evaluate: its checkpoints, their samples, measures and intervals, and votes."""
