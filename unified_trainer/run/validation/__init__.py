"""Validation: samples, metrics, files."""
