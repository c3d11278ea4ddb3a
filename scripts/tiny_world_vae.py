"""This stage of build_tiny_world trains the AutoencoderKLWan of the tiny world on rendered clips."""

import logging
import math
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from jaxtyping import Float
from torch import Tensor

from unified_trainer.data.tiny_world import BACKGROUND, SUBJECTS, check_attributes, draw_clip, render

log = logging.getLogger(__name__)

# Wan2.2's layout (pixel patches in front, residual resampling) at 1/20 of its width: 64 x 64 x 17 -> 16 x 5 x 4 x 4.
CONFIG = {
    "base_dim": 8,
    "decoder_base_dim": 16,
    "z_dim": 16,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "is_residual": True,
    "patch_size": 4,
    "in_channels": 48,
    "out_channels": 48,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}
LEARNING_RATE = 4e-3
KL_WEIGHT = 1e-4
OBJECT_WEIGHT = 6.0  # of a pixel that any frame's object covers; the ground has 1


def train(steps: int, batch: int, seed: int) -> AutoencoderKLWan:
    """Train with L2 + L1, weighted towards the object's pixels, and a small KL; the learning rate falls by a cosine."""
    torch.manual_seed(seed)
    blank = {"latents_mean": [0.0] * CONFIG["z_dim"], "latents_std": [1.0] * CONFIG["z_dim"]}
    vae = AutoencoderKLWan(**CONFIG, **blank)
    with torch.no_grad():  # a posterior of std e^-2: at std 1 the first thousand steps learn nothing
        vae.quant_conv.bias[CONFIG["z_dim"] :] = -4.0
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        picks = torch.randint(len(SUBJECTS), (batch,), generator=generator).tolist()
        video = render([draw_clip(SUBJECTS[i], generator) for i in picks]) * 2 - 1
        posterior = vae.encode(video).latent_dist
        error = vae.decode(posterior.sample(generator)).sample - video
        reconstruction = (object_weight(video) * (error.square() + 0.1 * error.abs())).mean()
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        optimizer.zero_grad()
        (reconstruction + KL_WEIGHT * kl).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            psnr = -10 * math.log10(error.square().mean().item() / 4)
            log.info("vae %d/%d %.0f s: psnr %.2f kl %.3f", step, steps, time.monotonic() - start, psnr, kl.item())
    return vae.eval()


def object_weight(video: Float[Tensor, "b 3 t h w"]) -> Float[Tensor, "b 1 t h w"]:
    ground = (torch.tensor(BACKGROUND) * 2 - 1).view(1, 3, 1, 1, 1)
    drawn = (video - ground).abs().amax(1, keepdim=True) > 0.1
    return 1 + (OBJECT_WEIGHT - 1) * drawn


@torch.no_grad()
def measure(vae: AutoencoderKLWan, seed: int) -> dict[str, float]:
    """Measure PSNR and accuracy on reconstructions of held-out clips; set the latent statistics in the config."""
    generator = torch.Generator().manual_seed(seed)
    clips = [draw_clip(subject, generator) for subject in SUBJECTS for _ in range(4)]
    video = render(clips)
    latents = torch.cat([vae.encode(v * 2 - 1).latent_dist.mean for v in video.split(16)])
    shown = torch.cat([vae.decode(z).sample for z in latents.split(16)]).div(2).add(0.5).clamp(0, 1)
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(), latents_std=latents.std((0, 2, 3, 4)).tolist()
    )
    psnr = -10 * (shown - video).square().mean((1, 2, 3, 4)).log10()
    right = check_attributes(shown, [clip.subject for clip in clips])
    return {"psnr_db": psnr.mean().item(), "psnr_worst_db": psnr.min().item()} | {
        "accuracy" if name == "all" else f"accuracy/{name}": hits.float().mean().item() for name, hits in right.items()
    }


def main(out: Path, *, steps: int = 4500, batch: int = 4, seed: int = 0) -> dict[str, float]:
    """Train, measure and save to `out`; return the measurements."""
    start = time.monotonic()
    vae = train(steps, batch, seed)
    measured = measure(vae, seed + 10_000) | {"steps": steps, "seconds": time.monotonic() - start}
    vae.save_pretrained(out)
    return measured
