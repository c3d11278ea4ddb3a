"""Wan with actions: each latent frame is told what a user does in its pixel frames.

To the time embedding of a frame's tokens it adds a layer of the actions of the pixel frames that the latent frame
joins, so that they change its modulation. The first latent frame has one pixel frame, and zeros before it.
The layer is zero in a folder that lacks it: the network then ignores actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import WanTransformer3DModel
from jaxtyping import Float
from torch import Tensor, nn

from unified_trainer.basics.actions import ACTIONS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.base import ActionForm, Shape
from unified_trainer.models.folder import WEIGHTS, check_component, outline
from unified_trainer.models.wan.model import WanModel

LAYER = "action_proj"
NEW = (f"{LAYER}.weight", f"{LAYER}.bias")
ACTING: dict[type[WanModel], Any] = {}  # kinds of models with actions, by the kind without


class ActionWanModel(WanModel):
    """A Wan transformer whose condition has the `actions` [b, frames, k] of all pixel frames up to those of a pass."""

    def __init__(
        self, network: WanTransformer3DModel, folder: Path | None, form: ActionForm, device: torch.device | None = None
    ) -> None:
        """Add the layer on a device: zero, or on the meta device without memory until `read` brings it."""
        super().__init__(network, folder)
        self.form = form
        self._actions: Tensor | None = None  # [b, f, k, ratio] of the latent frames of the pass that runs
        self._layer = nn.Conv1d(form.size, self.feature_size, form.ratio, form.ratio, device=device)
        for p in self._layer.parameters():
            nn.init.zeros_(p)
        network.condition_embedder.register_module(LAYER, self._layer)
        network.condition_embedder.time_embedder.register_forward_hook(self._add_actions)

    @classmethod
    def open_with(cls, place: Path, new: ActionForm | None) -> Self:
        """Open a component's folder, which holds the layer or gets a `new` one, trained beside adapters too."""
        held = form_of(place)
        if new and held and new != held:
            raise UserError(f"{place} takes actions of size {held.size}, not {new.size}: leave action_size out")
        form = new or held
        assert form is not None  # the folder holds the layer, or the settings name its size
        model = cls(outline(cls.network_class, place, NEW), place, form, torch.device("meta"))
        if new:
            vars(model)["new_layers"] = NEW
        return model

    def called(self, x: Latents, time: Tensor, cond: Condition, frames: Sequence[int]) -> Latents:
        self._actions = by_latent_frame(cond, frames, self.form)
        if time.ndim == 1:
            _, high, wide = self.network.config.patch_size
            time = time[:, None].expand(-1, len(frames) * (x.shape[3] // high) * (x.shape[4] // wide))
        return super().called(x, time, cond, frames)

    def example(
        self, shape: Shape | None = None, samples: int = 1, text_tokens: int = 4
    ) -> tuple[Latents, PerSample, Condition]:
        x, sigma, cond = super().example(shape, samples, text_tokens)
        draw = torch.Generator().manual_seed(2)
        actions = torch.randn(samples, self.form.pixel_frames(x.shape[2]), self.form.size, generator=draw)
        return x, sigma, cond.updated(Condition({ACTIONS: actions.to(x.device)}))

    def _add_actions(self, _embedder: nn.Module, _inputs: tuple[Any, ...], embedded: Tensor) -> Tensor:
        """Add to the embedding [b, n, d] of the times of all tokens, frame by frame."""
        assert self._actions is not None  # of the pass that runs
        b, frames = self._actions.shape[:2]
        added = self._layer(self._actions.flatten(0, 1)).view(b, frames, 1, -1)
        return (embedded.unflatten(1, (frames, -1)) + added).flatten(1, 2)


def by_latent_frame(cond: Condition, frames: Sequence[int], form: ActionForm) -> Float[Tensor, "b f k ratio"]:
    """Return the actions of the pixel frames of these latent frames; UserError for other ones than the network's."""
    if ACTIONS not in cond.tensors:
        raise UserError(f"this network needs actions of size {form.size} for each frame: give rows with {ACTIONS}")
    actions, least = cond[ACTIONS], form.pixel_frames(max(frames) + 1)
    if actions.shape[2] != form.size or actions.shape[1] < least:
        raise UserError(
            f"this network needs actions [frames, {form.size}] of {least} frames or more, not {list(actions.shape[1:])}"
        )
    joined = nn.functional.pad(actions, (0, 0, form.ratio - 1, 0)).unfold(1, form.ratio, form.ratio)
    at = torch.tensor(list(frames)).to(joined.device, non_blocking=True)
    return joined.index_select(1, at)


def with_actions(kind: type[WanModel]) -> Any:
    """Return a kind of model, causal or with a condition image, that takes actions too: one class for each kind."""
    if kind not in ACTING:
        ACTING[kind] = type(f"Action{kind.__name__}", (ActionWanModel, kind), {})
    return ACTING[kind]


@dataclass(frozen=True)
class ActingKind:
    """Makes models with actions of networks that are laid out without their layer; equal ones are one key."""

    kind: type[WanModel]
    form: ActionForm
    new: bool  # whether the folder lacks the layer

    network_class = WanTransformer3DModel

    def __call__(self, network: WanTransformer3DModel) -> WanModel:
        model: WanModel = with_actions(self.kind)(network, None, self.form)
        if self.new:
            vars(model)["new_layers"] = NEW
        return model


def form_of(place: Path) -> ActionForm | None:
    """Return the actions that a component's weights take, from the names and shapes of its files."""
    if not any(place.glob(f"{WEIGHTS}*.safetensors")):
        return None  # what reads the weights names what is missing
    shape = next((shape for key, shape in check_component(place, WEIGHTS).items() if key.endswith(NEW[0])), None)
    if shape is None:
        return None
    if len(shape) != 3:
        raise UserError(f"{place}: its weights are quantised, and no such network takes actions: name another one")
    return ActionForm(shape[1], shape[2])
