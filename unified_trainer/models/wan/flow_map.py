"""Wan as a flow map: its time embedding also says how far the step goes.

To the embedding of the time t it adds a linear layer of the embedding of t - r, by the same embedder. The layer is zero
in a folder that lacks it: the network then is the velocity at t, whatever r is.
"""

from pathlib import Path
from typing import Any, Self

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition, Latents, PerSample
from unified_trainer.models.flow_map import end_of
from unified_trainer.models.folder import WEIGHTS, check_component, check_new_layers, outline
from unified_trainer.models.wan.image_model import FirstFrameWanModel
from unified_trainer.models.wan.model import network_time

LAYER = "span_proj"


class FlowMapWanModel(FirstFrameWanModel):
    """A Wan transformer of text, or of TI2V, whose velocity is the mean one of a step that its condition ends."""

    new_layers = (f"{LAYER}.weight", f"{LAYER}.bias")

    def __init__(
        self, network: WanTransformer3DModel, folder: Path | None = None, device: torch.device | None = None
    ) -> None:
        """Add the layer on a device: zero, or on the meta device without memory until `read` brings it."""
        super().__init__(network, folder)
        self._span: Tensor | None = None  # network time of t - r in the pass that runs
        self._layer = nn.Linear(self.feature_size, self.feature_size, device=device)
        for p in self._layer.parameters():
            nn.init.zeros_(p)
        network.condition_embedder.register_module(LAYER, self._layer)
        network.condition_embedder.time_embedder.register_forward_hook(self._add_span)

    @classmethod
    def open(cls, folder: Path, component: str) -> Self:
        """Open a component of a folder; UserError for one that reads an image as channels."""
        place = folder / component
        network = outline(cls.network_class, place, cls.new_layers)
        if network.config.in_channels != network.config.out_channels:
            raise UserError(f"{place} reads an image as channels, and no such network is a flow map")
        model = cls(network, place, torch.device("meta"))
        check_new_layers(network, place, cls.new_layers)
        return model

    def velocity(self, x_t: Latents, sigma: PerSample, cond: Condition) -> Latents:
        """Predict the mean velocity of the step, in float32."""
        self._span = network_time(sigma - end_of(sigma, cond), x_t)
        return super().velocity(x_t, sigma, cond)

    def _add_span(self, embedder: nn.Module, inputs: tuple[Any, ...], embedded: Tensor) -> Tensor:
        waves = self.network.condition_embedder.timesteps_proj(self._span).to(inputs[0])
        added = self._layer(embedder.forward(waves))
        return embedded + (added if embedded.ndim == 2 else added[:, None])  # one time for each sample, or token


def check_velocity(folder: Path) -> None:
    """Raise UserError if a component's files hold the layer of a flow map, whose output is no velocity at one level."""
    if any(key.endswith(FlowMapWanModel.new_layers) for key in check_component(folder, WEIGHTS)):
        raise UserError(
            f"{folder} holds a flow map ({LAYER}): set flow_map of the role that opens it, such as --student.flow-map, "
            "or name the folder of another model"
        )
