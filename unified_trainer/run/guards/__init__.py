"""Guards: what watches a run for signs that its student goes wrong, and what the run then does."""
