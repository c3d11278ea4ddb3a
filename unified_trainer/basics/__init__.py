"""Errors, ranges, types, input files, plug-ins, suggestions, terminal."""
