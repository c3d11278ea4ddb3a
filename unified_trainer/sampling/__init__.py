"""From noise to latents."""
