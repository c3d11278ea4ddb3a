"""The part that codecs of frozen networks share: prompts that are encoded once, a VAE that may be away between uses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch
import transformers

from unified_trainer.basics.types import Condition, Latents, Video
from unified_trainer.models.base import Codec, Prompt
from unified_trainer.models.frozen_network import FrozenNetwork
from unified_trainer.models.prompt_embeddings import PromptEmbeddings
from unified_trainer.models.prompt_tensors import difference
from unified_trainer.parallel.mesh import Mesh


class FrozenCodec(Codec):
    """Base of codecs: the part of `Codec` that is the same for all of them; it sets no attribute."""

    libraries: ClassVar[tuple[ModuleType, ...]] = (torch, transformers)  # whose versions the tensors depend on
    _embeddings: PromptEmbeddings
    _vae: FrozenNetwork

    def cleaned(self, prompt: str) -> str:
        """Return a prompt as it is encoded; prompts that are equal here have one embedding."""
        return prompt

    def _text_parts(self) -> list[Path]:
        """Return the folders of what encodes a prompt."""
        raise NotImplementedError

    def _free_text(self) -> None:
        """Remove the text encoders from memory."""
        raise NotImplementedError

    def prompts(self, prompts: Sequence[str]) -> list[Prompt]:
        return self._embeddings.rows([self.cleaned(prompt) for prompt in prompts])

    def remember(self, prompt: str, tensors: Prompt) -> None:
        self._embeddings.store(self.cleaned(prompt), tensors)

    def encode_text(self, prompts: Sequence[str]) -> Condition:
        return self.text_condition(self.prompts(prompts))

    def text_difference(self, prompt: str, tensors: Prompt) -> float:
        return difference(self.prompts([prompt])[0], tensors)

    def encode_ahead(self, prompts: Sequence[str], mesh: Mesh) -> str:
        distinct = list(dict.fromkeys(self.cleaned(prompt) for prompt in prompts))
        counts = self._embeddings.encode_ahead(distinct, mesh)
        self._free_text()
        said = f"text encoder: {len(distinct)} distinct prompts, {counts.found} encoded before, {counts.encoded} now"
        rest = f"{counts.left} when they are drawn" if counts.left else "not in memory"
        return f"{said}, {rest}; embeddings in {self._embeddings.place}"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with self._vae.in_use():
            yield

    def encode(self, video: Video) -> Latents:
        return self.normalise(self.encode_raw(video))

    def _identity(self) -> str:
        """Return what the tensors of a prompt depend on: names, sizes and times of files, and library versions."""
        files = sorted(file for part in self._text_parts() for file in part.rglob("*") if file.is_file())
        facts = [(str(file.relative_to(self.folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return ", ".join([*(f"{library.__name__} {library.__version__}" for library in self.libraries), str(facts)])
