"""This package computes from the settings of a run what it needs: memory, network calls, FLOPs, time and bytes."""
