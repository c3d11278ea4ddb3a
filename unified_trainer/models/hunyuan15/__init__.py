"""The HunyuanVideo 1.5 family: model and codec of text to video."""
