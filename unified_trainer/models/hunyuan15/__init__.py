"""The HunyuanVideo 1.5 family: model and codec of text to video, and of text and an image to video."""
