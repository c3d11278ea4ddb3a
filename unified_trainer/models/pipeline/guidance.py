"""The rule by which a pipeline guides: what its scheduler is given, compared with rules that are known."""

from itertools import permutations
from typing import Any, Literal

from PIL import Image as Picture
from torch import Tensor

from unified_trainer.models.pipeline.calls import CallRecord, Pipeline
from unified_trainer.models.pipeline.latents import FoundLatents
from unified_trainer.models.pipeline.values import Place, Size, part, same, stacked

Rule = Literal["plain", "norm", "unknown"]  # norm: each token, or row, keeps the norm of the conditional velocity

SCALE = 3.0
NEGATIVE = "of another length than the prompt, because a tokenizer may not know any of the words"


def rule_of(
    pipeline: Pipeline,
    prompt: str,
    size: Size,
    image: Picture.Image,
    latents: FoundLatents,
    *,
    sign: float,
    output: Place | None,
) -> tuple[Rule, float]:
    """Return the rule, and by how much our scale is larger than the pipeline's.

    Ours is w of uncond + w (cond - uncond); pipelines that write cond + s (cond - uncond) have s = w - 1.
    """
    seen = _guided(pipeline, prompt, size, image)
    each = len(seen.inputs) // len(seen.steps)  # calls of the network in a step
    made = [part(stacked(x), output).double() * sign for x in seen.outputs[:each]]
    given = latents.of_given(stacked(seen.steps[0][0]).double())
    passes = [x.reshape(1, *latents.native) for each_call in made for x in each_call]
    if len(passes) == 1:
        return "plain", 0.0  # it has no guidance by two passes
    for cond, uncond in permutations(passes[:2], 2):
        for more in (0.0, 1.0):
            guided = uncond + (SCALE + more) * (cond - uncond)
            if same(latents.of_step(guided), given):
                return "plain", more
            if same(latents.of_step(with_norm(guided, cond)), given):
                return "norm", more
    return "unknown", 0.0


def with_norm(guided: Tensor, cond: Tensor) -> Tensor:
    """Return `guided` with the norms that `cond` has along the last axis of the pipeline's own latents."""
    return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


def _guided(pipeline: Pipeline, prompt: str, size: Size, image: Picture.Image) -> CallRecord:
    """Call the pipeline with guidance."""
    options: dict[str, Any] = {"negative_prompt": NEGATIVE} if "negative_prompt" in pipeline.names else {}
    guider = pipeline.pipe.components.get("guider")
    if guider is not None:
        pipeline.pipe.guider = guider.new(guidance_scale=SCALE)
    scale = next((name for name in ("true_cfg_scale", "guidance_scale") if name in pipeline.names), None)
    if scale:
        options[scale] = SCALE
    try:
        return pipeline.call([prompt], size, image, **options)
    finally:
        if guider is not None:
            pipeline.pipe.guider = guider
