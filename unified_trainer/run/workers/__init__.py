"""Ray: who makes the samples of a run, on which machine, with which weights, and what happens when a process dies."""
