"""Write a student as a diffusers folder."""
