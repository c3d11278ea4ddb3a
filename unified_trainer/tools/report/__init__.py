"""Reports: what a run directory holds, read into dataclasses and shown as one HTML page or a table."""
