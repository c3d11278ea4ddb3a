"""The Stable Diffusion 3 family: model and codec of text to image."""
