"""This stage of build_tiny_world trains the AutoencoderKLWan of the tiny world on rendered clips."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def train(
    config: Mapping[str, Any],
    draw: Callable[[int, torch.Generator], Float[Tensor, "b 3 t h w"]],
    ground: Sequence[float],
    steps: int,
    batch: int,
    seed: int,
    start: Path | None = None,
) -> AutoencoderKLWan:
    """Train on clips in [0, 1] that `draw` makes, a number of them at a time, with L2 + L1 and a small KL.

    Pixels that are not of the color `ground` count more. The learning rate falls by a cosine. Weights of the VAE in the
    folder `start` that have the same name and shape are begun with.
    """
    torch.manual_seed(seed)
    blank = {"latents_mean": [0.0] * config["z_dim"], "latents_std": [1.0] * config["z_dim"]}
    vae = AutoencoderKLWan(**config, **blank)
    with torch.no_grad():  # a posterior of std e^-2: at std 1 the first thousand steps learn nothing
        vae.quant_conv.bias[config["z_dim"] :] = -4.0
    if start is not None:
        own = {key: weight.shape for key, weight in vae.state_dict().items()}
        given = AutoencoderKLWan.from_pretrained(start).state_dict().items()
        vae.load_state_dict({k: w for k, w in given if own.get(k) == w.shape}, strict=False)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        video = draw(batch, generator) * 2 - 1
        posterior = vae.encode(video).latent_dist
        error = vae.decode(posterior.sample(generator)).sample - video
        reconstruction = (object_weight(video, ground) * (error.square() + 0.1 * error.abs())).mean()
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        optimizer.zero_grad()
        (reconstruction + KL_WEIGHT * kl).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            decibels = -10 * math.log10(error.square().mean().item() / 4)
            log.info("vae %d/%d %.0f s: psnr %.2f kl %.3f", step, steps, time.monotonic() - began, decibels, kl.item())
    return vae.eval()


def object_weight(video: Float[Tensor, "b 3 t h w"], ground: Sequence[float]) -> Float[Tensor, "b 1 t h w"]:
    far = (video - (torch.tensor(ground) * 2 - 1).view(1, 3, 1, 1, 1)).abs()
    drawn = far.amax(1, keepdim=True) > 0.1
    return 1 + (OBJECT_WEIGHT - 1) * drawn


@torch.no_grad()
def reconstruct(vae: AutoencoderKLWan, video: Float[Tensor, "b 3 t h w"]) -> Float[Tensor, "b 3 t h w"]:
    """Encode and decode clips in [0, 1]; set the statistics of their latents in the config."""
    latents = torch.cat([vae.encode(v * 2 - 1).latent_dist.mean for v in video.split(16)])
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(), latents_std=latents.std((0, 2, 3, 4)).tolist()
    )
    return torch.cat([vae.decode(z).sample for z in latents.split(16)]).div(2).add(0.5).clamp(0, 1)


def psnr(shown: Float[Tensor, "b 3 t h w"], video: Float[Tensor, "b 3 t h w"]) -> dict[str, float]:
    """Return the mean and the worst PSNR of clips in [0, 1]."""
    decibels = -10 * (shown - video).square().mean((1, 2, 3, 4)).log10()
    return {"psnr_db": decibels.mean().item(), "psnr_worst_db": decibels.min().item()}


def measure(vae: AutoencoderKLWan, seed: int) -> dict[str, float]:
    """Measure PSNR and accuracy on reconstructions of held-out clips; set the latent statistics in the config."""
    generator = torch.Generator().manual_seed(seed)
    clips = [draw_clip(subject, generator) for subject in SUBJECTS for _ in range(4)]
    video = render(clips)
    shown = reconstruct(vae, video)
    right = check_attributes(shown, [clip.subject for clip in clips])
    return psnr(shown, video) | {
        "accuracy" if name == "all" else f"accuracy/{name}": hits.float().mean().item() for name, hits in right.items()
    }


def draw(count: int, generator: torch.Generator) -> Float[Tensor, "b 3 t h w"]:
    """Draw clips of any subjects of the tiny world."""
    picks = torch.randint(len(SUBJECTS), (count,), generator=generator).tolist()
    return render([draw_clip(SUBJECTS[i], generator) for i in picks])


def main(out: Path, *, steps: int = 4500, batch: int = 4, seed: int = 0) -> dict[str, float]:
    """Train, measure and save to `out`; return the measurements."""
    start = time.monotonic()
    vae = train(CONFIG, draw, BACKGROUND, steps, batch, seed)
    measured = measure(vae, seed + 10_000) | {"steps": steps, "seconds": time.monotonic() - start}
    vae.save_pretrained(out)
    return measured
