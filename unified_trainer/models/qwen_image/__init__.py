"""The Qwen-Image family: model and codec of text to image."""
