"""Devices, ranks, sharding, sequence parallelism and randomness."""
