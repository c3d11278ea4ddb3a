"""Formulas as functions of tensors: torch in, torch out."""
