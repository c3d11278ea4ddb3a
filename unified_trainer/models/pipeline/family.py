"""The family of all pipelines of diffusers that no other family opens."""

from pathlib import Path

from unified_trainer.basics.input_files import read_json
from unified_trainer.models.base import Family, Shape
from unified_trainer.models.pipeline.codec import PipelineCodec
from unified_trainer.models.pipeline.known import known
from unified_trainer.models.pipeline.model import PipelineModel


def latent_shape(folder: Path, frames: int, height: int, width: int) -> Shape:
    """Return the shape of latents; UserError for a size that the pipeline does not make."""
    return known(folder).of_size((frames, height, width)).shape


def images(folder: Path) -> tuple[int, int]:
    """Return the fewest and the most condition images of a sample."""
    return (1, 1) if known(folder).any().images else (0, 0)


def networks(folder: Path) -> tuple[tuple[str, ...], float | None]:
    """Return the networks, of high noise first, and the level at which they meet."""
    index = read_json(folder / "model_index.json")
    level = index.get("boundary_ratio")
    return tuple(known(folder).pipeline.networks), level if isinstance(level, float) else None


def pipeline_family(name: str) -> Family:
    """Return the family of a pipeline class of diffusers, which learns from the pipeline's own call."""
    return Family(
        pipelines=(name,),
        model=PipelineModel.open,
        codec=PipelineCodec.load,
        latent_channels=lambda folder: known(folder).any().shape[0],
        latent_shape=latent_shape,
        tokens=lambda folder, shape: known(folder).of_shape(shape).features[2],
        networks=networks,
        images=images,
        given_levels=True,
    )
