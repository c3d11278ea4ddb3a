"""Formulas as functions of tensors; no state, no device, no randomness. They import torch and nothing above them."""
