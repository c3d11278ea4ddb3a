"""The LTX-2 family: model and codec of text to video with sound, whose latents are one tensor."""
