"""Formulas as functions of tensors, and random numbers as functions of a key; no state, nothing above torch."""
