"""Refuse what cannot work, before weights are loaded."""
