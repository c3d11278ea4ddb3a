"""Devices, ranks, sharding and randomness."""
