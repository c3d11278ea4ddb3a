"""What a run needs, computed from its settings alone: memory, calls of networks, FLOPs, time and bytes."""
