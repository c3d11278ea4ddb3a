"""A diffusers network as a video model: opening, reading and writing it, and features."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Latents, PerFrame, PerSample
from unified_trainer.models.adapter_file import AdapterFile
from unified_trainer.models.folder import is_quantised, outline, read_weights
from unified_trainer.numerics.flow import guide
from unified_trainer.parallel.fsdp import without_forward_prefetch
from unified_trainer.parallel.mesh import Mesh


def widen(_norm: nn.RMSNorm, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Widen the input to float32, as the weight is: of a bf16 one torch makes several kernels, and rounds twice."""
    return (inputs[0].float(),)


class DiffusersModel:
    """Base of the models of a family whose networks are diffusers classes.

    A family sets `network_class` and `adapter_layers` and defines `blocks`, `feature_size`, `velocity` and `example`,
    which VideoModel describes. A value function runs the first blocks alone where the lists of blocks are attributes of
    the network, over which its forward iterates.
    """

    network_class: ClassVar[type[ModelMixin]]
    adapter_layers: tuple[str, ...]
    new_layers: ClassVar[tuple[str, ...]] = ()
    pass_share: Mapping[str, Fraction] = MappingProxyType({})

    def __init__(self, network: nn.Module, folder: Path | None = None) -> None:
        """Take a network; `folder` holds its weights while it is an outline without memory."""
        self.network = network
        self._folder = folder

    @classmethod
    def open(cls, folder: Path, component: str) -> Self:
        """Open a component of a pipeline folder in float32, without weights: `read` brings them."""
        return cls._opened(cls.network_class, folder / component)

    @classmethod
    def _opened(cls, kind: type[ModelMixin], place: Path, *facts: Any) -> Self:
        if not is_quantised(place):
            return cls(outline(kind, place), place, *facts)
        from unified_trainer.models.quantize import open_quantised

        network, read = open_quantised(kind, place)
        model = cls(network, None, *facts)
        vars(model)["read"] = read
        return model

    def read(self, mesh: Mesh, merged: AdapterFile | None = None) -> None:
        if self._folder is not None:
            read_weights(self.network, self._folder, mesh, merged, self.new_layers)
            self._folder = None
            for module in self.network.modules():
                for name, table in list(module.named_buffers(recurse=False)):
                    setattr(module, name, table.to(mesh.device))

    def guide(self, cond: Latents, uncond: Latents, guidance_scale: float | PerSample | PerFrame) -> Latents:
        return guide(cond, uncond, guidance_scale)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        raise NotImplementedError

    @contextmanager
    def features(self, *, alone: bool = False) -> Iterator[list[Tensor]]:
        seen: list[Tensor] = []
        middle = len(self.blocks) // 2
        hook = self.blocks[middle].register_forward_hook(lambda _block, _inputs, y: seen.append(self.whole(y)))
        try:
            with self._ending_at(middle) if alone else nullcontext():
                yield seen
        finally:
            hook.remove()

    @contextmanager
    def _ending_at(self, last: int) -> Iterator[None]:
        """Let the network see shorter lists of its blocks, up to block `last`. All blocks stay its modules."""
        blocks = self.blocks
        lists = {name: part for name, part in self.network.named_children() if isinstance(part, nn.ModuleList)}
        left = {id(block) for block in blocks[last + 1 :]}
        if not left <= {id(block) for part in lists.values() for block in part}:
            yield  # all blocks run
            return
        attributes = vars(self.network)  # are found before modules of the same name
        attributes.update({name: [block for block in part if id(block) not in left] for name, part in lists.items()})
        try:
            with without_forward_prefetch(blocks[last], blocks[last + 1 : last + 2]):
                yield
        finally:
            for name in lists:
                del attributes[name]

    def whole(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all sequence ranks, of those that this rank holds."""
        return tokens

    def share_tokens(self, mesh: Mesh) -> None:
        raise UserError(f"{type(self).__name__} cannot share tokens between ranks: set parallel.sequence 1")

    def save(self, folder: Path, component: str, dtype: torch.dtype) -> None:
        kept = self.network._keep_in_fp32_modules or []  # diffusers does not load these in half precision either
        for key, weight in self.network.named_parameters():
            if not set(kept) & set(key.split(".")):
                weight.data = weight.data.to(dtype)
        self.network.register_to_config(_name_or_path="")
        self.network.save_pretrained(folder / component)
        mode = (folder / component / self.network.config_name).stat().st_mode
        for file in (folder / component).glob("*.safetensors"):  # written with mode 0600 whatever the umask is
            file.chmod(mode)
        self.network.float()

    def compiled_inputs(self, *inputs: Any) -> tuple[Any, ...]:
        return inputs
