"""How diffusers samples as a run does: the sampler for an exported pipeline, and a scheduler where there is one."""

import dataclasses
import math
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

from unified_trainer.numerics.flow import sigma_table
from unified_trainer.roles.role import RoleConfig
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.sampling.solver import SamplerConfig

SAMPLER = "scheduler/sampler.json"  # diffusers downloads scheduler/ whole, and not every file beside it

TRAIN_STEPS = 1000  # diffusers' network time of noise level 1
TOLERANCE = 1e-6  # of a noise level


def euler_scheduler(sampler: SamplerConfig, *, given: bool) -> FlowMatchEulerDiscreteScheduler | None:
    """Return the scheduler whose `sampler.num_steps` steps visit the sampler's noise levels, or None if none does.

    A pipeline that has the levels 1, (n - 1) / n, ... 1 / n `given` to it shifts them and stretches 1 - sigma so that
    the last is shift_terminal, as the sampler does. Otherwise FlowMatchEulerDiscreteScheduler spaces n levels evenly
    from 1 to the shifted 1/1000, then shifts and stretches them. The sampler's are u = 1 - i d, shifted by s and
    stretched. Both are Moebius maps of i that fix 1, so they are equal when the last level is, and the shift z solves
    (1 - s) z^2 + (s r + 999 (1 - s)) z = s r, r = 999 / (d (n - 1)).
    """
    if sampler.chunks.causal:
        return None
    steps, s = sampler.num_steps, sampler.shift
    levels = sampler.sigmas().tolist()
    settings: dict[str, float | bool] = {"shift": s, "stochastic_sampling": sampler.solver == "sde"}
    settings |= {"shift_terminal": sampler.terminal} if sampler.terminal else {}
    if steps > 1 and not given:
        d = 1 - sampler.step_sigmas[1] if sampler.step_sigmas else 1 / steps
        r = (TRAIN_STEPS - 1) / (d * (steps - 1))
        b = s * r + (TRAIN_STEPS - 1) * (1 - s)
        root = b * b + 4 * (1 - s) * s * r
        if root < 0:
            return None
        settings |= {"shift": 2 * s * r / (b + math.sqrt(root)), "shift_terminal": levels[-2]}
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_STEPS, **settings)
    scheduler.set_timesteps(sigmas=sigma_table(steps, 1.0)[:-1].tolist()) if given else scheduler.set_timesteps(steps)
    near = all(abs(a - b) < TOLERANCE for a, b in zip(scheduler.sigmas.tolist(), levels, strict=True))
    return scheduler if near else None


def sampler_file(run: RunConfig, role: RoleConfig, boundary: float | None, action_size: int) -> dict[str, Any]:
    """Return the content of `SAMPLER`: what a pipeline needs to sample as `sample` does, resolved to numbers."""
    sampler, video = run.sampler, run.video
    scale = sampler.guidance_scale
    return {
        "sigmas": sampler.sigmas().tolist(),
        "solver": sampler.solver,
        "guidance_scale": list(scale) if isinstance(scale, tuple) else [scale, scale],
        "negative_prompt": sampler.negative_prompt,
        "boundary": boundary,
        "precision": role.precision,
        "sparse_share": role.sparse.share,
        "sparse_tile": list(role.sparse.tile),
        "flow_map": role.is_flow_map,
        "action_size": action_size,
        **{"frames": video.frames, "height": video.height, "width": video.width},
        **dataclasses.asdict(sampler.chunks),
    }
