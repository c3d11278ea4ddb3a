"""The networks of a pipeline folder without weights, by which `plan` counts memory and FLOPs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unified_trainer.models.blueprint import Blueprint
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.model import PipelineModel, model_kind
from unified_trainer.models.pipeline.opening import NETWORKS, component_classes
from unified_trainer.models.pipeline.vae import decoded, fix, tile


@dataclass(frozen=True)
class PipelineParts:
    """Makes models of the networks of a folder, and runs its VAE."""

    folder: Path
    causal = False

    @property
    def network_class(self) -> Any:
        return component_classes(self.folder)[NETWORKS[0]]

    def __call__(self, network: Any) -> PipelineModel:
        return model_kind(known(self.folder))(network, None, known(self.folder))

    @property
    def vae_class(self) -> Any:
        return component_classes(self.folder)["vae"]

    def decoded(self, vae: Any, raw: Tensor) -> Tensor:
        fix(vae)
        frames = known(self.folder).video_frames((raw.shape[1], raw.shape[2], raw.shape[3], raw.shape[4]))
        return decoded(vae, raw[:, :, :frames], known(self.folder).any().latents)

    def tile(self, vae: Any, size: int) -> None:
        tile(vae, size, known(self.folder).any().pixels)


def blueprint(folder: Path) -> Blueprint:
    """Return the parts of a folder."""
    facts, pipeline, parts = known(folder).any(), known(folder).pipeline, PipelineParts(folder)

    def encode_flops() -> float:
        """Count the products of linear layers while the longest prompt is encoded, without attention scores."""
        seen: list[int] = []

        def note(layer: nn.Linear, inputs: tuple[Tensor], _output: Tensor) -> None:
            seen.append(2 * inputs[0].numel() // layer.in_features * layer.weight.numel())

        encoders = [part for name, part in pipeline.pipe.components.items() if name not in (*NETWORKS, "vae")]
        modules = [module for part in encoders if isinstance(part, nn.Module) for module in part.modules()]
        hooks = [module.register_forward_hook(note) for module in modules if isinstance(module, nn.Linear)]
        try:
            with pipeline.memory.every_layer():
                pipeline.call([pipeline.long], facts.size, stop=1)
        finally:
            for hook in hooks:
                hook.remove()
        return float(sum(seen))

    return Blueprint(parts, parts, facts.arguments.text_shapes, encode_flops)
