"""One trainer for few-step distillation and reinforcement learning of video diffusion models."""
