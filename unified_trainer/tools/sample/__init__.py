"""Sample, roll out, score."""
