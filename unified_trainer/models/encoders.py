"""The settings of text encoder and VAE."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from unified_trainer.basics.effects import WRITES
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import MAY_CHANGE, CountOrZero, Gibibytes, NonNegative
from unified_trainer.parallel.device import has_channels_last


@dataclass(frozen=True)
class EncoderConfig:
    """The settings of the text encoder and of the VAE, which all roles share."""

    text_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the text encoder; a UMT5-XXL is 21 GiB in fp32 and 11 GiB in bf16."""
    vae_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the VAE; auto is bf16 on accelerators and fp32 on a CPU. Latents and videos are fp32 in any case."""
    vae_slicing: bool = False
    """Encode and decode one sample at a time: without a gradient, the VAE's activations are those of one sample.
    Decoding chunk by chunk is neither sliced nor tiled."""
    vae_tile: CountOrZero = 0
    """Encode and decode larger frames in tiles of this many pixels a side, which overlap by a quarter and are blended,
    for less memory; a multiple of 64 for Wan. Values change where tiles meet (docs/performance.md). 0 takes whole
    frames."""
    vae_channels_last: Literal["auto"] | bool = "auto"
    """Hold the VAE's convolutions with channels last in memory, the order that most convolution kernels work in; auto
    does on CUDA. Values change by rounding. Not for an NPU."""
    offload: Annotated[bool, MAY_CHANGE] = False
    """Keep text encoder and VAE in CPU memory, and copy them to the device while they are used. A training step then
    makes all samples before it scores any, so that the VAE is copied once. Changes no result."""
    embedded_guidance: NonNegative | None = None
    """Guidance scale that a network takes as an input, as FLUX.1-dev does; by default that of the pipeline's call.
    Refused for networks that take none."""
    cache: Annotated[str, MAY_CHANGE, WRITES] = ""
    """Folder for the embeddings of prompts on a disk that all ranks share; several runs may share it too. By default
    prompt_embeddings in the run directory."""
    cache_memory_gib: Annotated[Gibibytes, MAY_CHANGE] = 1.0
    """Embeddings of prompts that each rank keeps in CPU memory, in GiB."""
    cache_disk_gib: Annotated[Gibibytes, MAY_CHANGE] = 100.0
    """Embeddings on disk, in GiB. The run's prompts are encoded before the first step as far as they fit; the text
    encoder is then removed from memory, and read again only for a prompt that did not fit."""

    def on(self, kind: str) -> "EncoderConfig":
        """Return the settings with what `auto` means on a device of this kind."""
        accelerated = kind != "cpu"
        precision, layout = self.vae_precision, self.vae_channels_last
        return replace(
            self,
            vae_precision=("bf16" if accelerated else "fp32") if precision == "auto" else precision,
            vae_channels_last=accelerated and has_channels_last(kind) if layout == "auto" else layout,
        )

    def check_tile(self, unit: int) -> None:
        """Raise UserError for a tile that the family's unit, in pixels, does not divide."""
        if self.vae_tile % unit:
            raise UserError(f"encoders.vae_tile must be a multiple of {unit}, or 0, not {self.vae_tile}")

    def check(self, kind: str) -> None:
        """Raise UserError for settings that a device of this kind cannot run; create the folder of the cache.

        Raise it also for a folder that cannot be written into.
        """
        if self.on(kind).vae_channels_last and not has_channels_last(kind):
            raise UserError(f"encoders.vae_channels_last: {kind} has no memory layout with channels last: leave it out")
        if self.cache:
            try:
                Path(self.cache).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.cache):
                    pass
            except OSError as error:
                raise UserError(
                    f"encoders.cache {self.cache} cannot be written into ({error.strerror}): name another folder, or "
                    "leave it out to use the run directory"
                ) from error
