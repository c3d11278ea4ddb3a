"""FVD's features: those of I3D, from its TorchScript file."""

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import agreed_bytes
from unified_trainer.basics.types import Video


class I3D:
    """Maps videos to the features that FVD compares (arXiv:1812.01717), a row for each video.

    The network is a TorchScript file with the interface of StyleGAN-V's i3d_torchscript.pt (arXiv:2112.14683), which is
    that of most published distances: it takes pixels from 0 to 255, and scales and resizes them itself.
    """

    def __init__(self, network: torch.jit.ScriptModule, device: torch.device, batch: int) -> None:
        self._network, self._device, self._batch = network, device, batch

    @classmethod
    def load(cls, file: Path, key: str, device: torch.device, shape: tuple[int, int, int], batch: int) -> "I3D":
        """Load a file and try it on a black video; UserError, naming `key`, unless it gives features.

        `shape` is frames, height and width; `batch` videos are seen at a time.
        """
        content = BytesIO(agreed_bytes(str(file), key))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the published file is in no newer format
                network = torch.jit.load(content, map_location=device).eval()
            loaded = cls(network, device, batch)
            seen: Any = loaded(torch.zeros(1, 3, *shape))
        except (torch.jit.Error, RuntimeError, ValueError, OSError) as error:
            size, reason = " x ".join(map(str, shape)), " ".join(str(error).strip().splitlines()[-1:])
            raise UserError(
                f"{key} {file} gives no features of {size} pixels ({reason}): it must be I3D as "
                "TorchScript, such as i3d_torchscript.pt of StyleGAN-V, which needs about ten frames"
            ) from error
        if not isinstance(seen, Tensor) or seen.ndim != 3:
            raise UserError(f"{key} {file} gives no vector of each video: it must be I3D as TorchScript")
        return loaded

    @torch.no_grad()
    def __call__(self, video: Video) -> Float[Tensor, "b 1 d"]:
        """Return the features of videos in [0, 1]."""
        pixels = (video.float() * 255).split(self._batch)
        of = [self._network(part.to(self._device), rescale=True, resize=True, return_features=True) for part in pixels]
        return torch.cat(of)[:, None]
