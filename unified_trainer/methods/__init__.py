"""One file per algorithm; each yields losses."""
