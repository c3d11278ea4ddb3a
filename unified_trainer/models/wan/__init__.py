"""The Wan family."""
