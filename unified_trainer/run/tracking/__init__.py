"""Where metrics, samples and messages of a run go."""
