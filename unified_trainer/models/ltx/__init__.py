"""The LTX-Video family: model and codec of text to video, and of text and an image to video."""
