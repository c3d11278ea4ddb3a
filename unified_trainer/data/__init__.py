"""Prompts and clips."""
