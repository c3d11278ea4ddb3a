"""The rule by which a pipeline guides: what its scheduler is given, compared with rules that are known."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeGuidance
from torch import Tensor
from torch.nn.functional import normalize

from unified_trainer.basics.types import Latents, PerFrame, PerSample
from unified_trainer.models.pipeline.calls import SHORT, CallRecord, Pipeline, Shown
from unified_trainer.models.pipeline.latents import FoundLatents
from unified_trainer.models.pipeline.values import Place, Size, differ, made_of, part, same, stacked
from unified_trainer.numerics.flow import guide

SCALE = 3.0
NEGATIVE = "of another length than the prompt, because a tokenizer may not know any of the words"
# what an AdaptiveProjectedGuidance has whose steps do not depend on each other
STEADY: dict[str, Any] = {"start": 0.0, "stop": 1.0, "guidance_rescale": 0.0, "use_original_formulation": False}
STEADY |= {"adaptive_projected_guidance_momentum": None, "adaptive_projected_guidance_norm_dim": None}


@dataclass(frozen=True)
class Rule:
    """A rule of guidance, whose scale w is that of uncond + w (cond - uncond)."""

    kind: Literal["plain", "norm", "projected", "unknown"]  # norm: each token, or row, keeps that of cond
    more: float = 0.0  # by how much w is larger than the pipeline's scale: some write cond + s (cond - uncond)
    eta: float = 1.0  # projected: the factor of the part of cond - uncond that is parallel to cond
    longest: float = math.inf  # projected: the largest norm of cond - uncond
    guider: str = "the pipeline"  # unknown: what has it

    def __str__(self) -> str:
        """Return what is to be said of it; "" for plain guidance."""
        words = {
            "norm": "guidance keeps the norm of the conditional velocity",
            "projected": "guidance is projected",
            "unknown": f"guidance: {self.guider} has a rule of its own, and uncond + w (cond - uncond) is used",
        }
        return words.get(self.kind, "")

    def guided(
        self, cond: Latents, uncond: Latents, guidance_scale: float | PerSample | PerFrame, latents: FoundLatents
    ) -> Latents:
        """Return the guided velocity."""
        if self.kind == "projected":
            cond = uncond + projected(cond - uncond, cond, self.eta, self.longest)
        guided = guide(cond, uncond, guidance_scale)
        if self.kind == "norm":
            guided = latents.ours(with_norm(latents.packed(guided), latents.packed(cond)))
        return guided


def projected(change: Tensor, cond: Tensor, eta: float, longest: float) -> Tensor:
    """Return cond - uncond, cut to a norm, with its part parallel to cond times eta (arXiv:2410.02416, 3.2)."""
    change, along = change.flatten(1), normalize(cond.flatten(1), dim=1)
    change = change * (longest / change.norm(dim=1, keepdim=True)).clamp(max=1)
    return (change + (eta - 1) * (change * along).sum(1, keepdim=True) * along).reshape(cond.shape)


def with_norm(guided: Tensor, cond: Tensor) -> Tensor:
    """Return `guided` with the norms that `cond` has along the last axis of the pipeline's own latents."""
    return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


def rule_of(pipeline: Pipeline, seen: CallRecord, latents: FoundLatents, *, sign: float, output: Place | None) -> Rule:
    """Return the rule with which a guided call agrees in its first step."""
    guider = pipeline.pipe.components.get("guider")
    each = len(seen.inputs) // len(seen.steps)  # calls of the network in a step
    made = [part(stacked(made_of(x)), output).double() * sign for x in seen.outputs[:each]]
    given = latents.of_given(stacked(seen.steps[0][0]).double())
    passes = [latents.ours(x.reshape(1, *latents.native)) for each_call in made for x in each_call]
    if len(passes) == 1:
        return Rule("plain")  # it has no guidance by two passes
    rules = [Rule("plain"), Rule("plain", more=1.0)]
    if not seen.sound_steps:  # which has no rows among those of the video
        rules += [Rule("norm"), Rule("norm", more=1.0)]
    if isinstance(guider, AdaptiveProjectedGuidance):
        config = dict(guider.config)
        known = STEADY.items() <= config.items()
        limit = config["adaptive_projected_guidance_rescale"] or math.inf
        rules = [Rule("projected", eta=config["eta"], longest=limit)] if known else []
    elif guider is not None and not isinstance(guider, ClassifierFreeGuidance):
        rules = []  # it may change from step to step
    for rule in rules:
        for cond, uncond in permutations(passes[:2], 2):
            guided = rule.guided(cond, uncond, SCALE + rule.more, latents)
            if same(latents.of_step(latents.packed(guided)), given):
                return rule
    return Rule("unknown") if guider is None else Rule("unknown", guider=type(guider).__name__)


def negative_place(pipeline: Pipeline, size: Size, seen: CallRecord, text: Collection[str]) -> tuple[int, int] | None:
    """Return the call of a guided step, and the row in it, with the tensors of a negative prompt unlike a prompt's.

    None where both have the same tensors, or where those of a row follow from other rows too. `seen` is a guided call,
    and `text` are the network's arguments that follow from a prompt.
    """
    each, rows = len(seen.inputs) // len(seen.steps), len(stacked(made_of(seen.outputs[0])))
    if "negative_prompt" not in pipeline.names or each * rows < 2:
        return None

    def tensors(given: Mapping[str, Any], row: int) -> list[Any]:
        return [None if given.get(name) is None else given[name][row] for name in text]

    other = guided(pipeline, size, None, SHORT, stop=each)
    as_prompt = tensors(pipeline.call([NEGATIVE], size, stop=1).inputs[0], 0)
    places = [(call, row) for call in range(each) for row in range(rows)]
    changed = [at for at in places if differ(*(tensors(x.inputs[at[0]], at[1]) for x in (seen, other)))]
    unlike = [(call, row) for call, row in changed if differ(tensors(seen.inputs[call], row), as_prompt)]
    return unlike[0] if len(changed) == len(unlike) == 1 else None


def guided(
    pipeline: Pipeline, size: Size, shown: Shown | None = None, negative: str = NEGATIVE, *, stop: int = 0
) -> CallRecord:
    """Call the pipeline with guidance."""
    options: dict[str, Any] = {"negative_prompt": negative} if "negative_prompt" in pipeline.names else {}
    guider = pipeline.pipe.components.get("guider")
    if guider is not None:
        pipeline.pipe.guider = guider.new(guidance_scale=SCALE)
    scale = next((name for name in ("true_cfg_scale", "guidance_scale") if name in pipeline.names), "")
    options |= {name: SCALE for name in (scale, f"audio_{scale}") if name in pipeline.names}
    try:
        return pipeline.call([SHORT], size, shown, stop=stop, **options)
    finally:
        if guider is not None:
            pipeline.pipe.guider = guider
