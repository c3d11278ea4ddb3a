"""Prepare data for training."""
