"""The embeddings of prompts: each prompt is encoded once, and kept in memory and on disk up to a bound.

FOLDER/ENCODER/XX/HASH.safetensors   one prompt's embedding, without padding; HASH is the SHA-256 of the prompt, which
                                     begins with XX, and ENCODER identifies what encoded it
"""

import hashlib
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.parallel.mesh import Mesh

NAME = "embedding"  # of the tensor in a file
LEFT = 86400  # seconds after which an unfinished file has no process that writes it
Embedding = Float[Tensor, "n d"]  # n tokens, in the encoder's own dtype, on the CPU


class Counts(NamedTuple):
    """The prompts that were encoded ahead, over all ranks."""

    found: int  # embeddings that were on disk already
    encoded: int
    left: int  # prompts that `cache_disk_gib` leaves no room for


class PromptEmbeddings:
    """The embeddings of prompts, read from memory, from disk, or else computed.

    A file that is damaged, of another prompt, or that another encoder wrote, is never used. What one rank or run writes
    at any moment, others may read: files appear complete, under their name, or not at all.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], Generator[Embedding, None, None]],
        encoder: str,
        width: int,
        config: EncoderConfig,
    ) -> None:
        """`encode` yields one embedding for each prompt, a function of the prompt alone, of `width` channels.

        `encoder` identifies it.
        """
        self._encode, self._width = encode, width
        self._encoder = hashlib.sha256(encoder.encode()).digest()
        self._root = Path(config.cache) if config.cache else None
        self._memory_bytes, self._disk_bytes = (
            int(gib * 2**30) for gib in (config.cache_memory_gib, config.cache_disk_gib)
        )
        self._memory: dict[str, Embedding] = {}  # the least recently used first
        self._used = 0  # bytes in memory

    @property
    def place(self) -> str:
        """The folder of the embeddings, or memory."""
        return str(self._root or "memory")

    def rows(self, prompts: Sequence[str]) -> list[Embedding]:
        """Return the embeddings of the prompts, in order."""
        embeddings = {prompt: self._held(prompt) for prompt in dict.fromkeys(prompts)}
        if missing := [prompt for prompt, embedding in embeddings.items() if embedding is None]:
            embeddings |= zip(missing, self._encode(missing), strict=True)
        for prompt, embedding in embeddings.items():
            self._remember(prompt, embedding)
        return [embeddings[prompt] for prompt in prompts]

    def store(self, prompt: str, embedding: Tensor) -> None:
        """Keep an embedding that was made elsewhere, unless there is one of the prompt.

        Raise UserError for one that this encoder cannot have made.
        """
        if not self._fits(embedding):
            kind = f"{str(embedding.dtype).removeprefix('torch.')} {[*embedding.shape]}"
            raise UserError(f"an embedding {kind}, expected finite numbers [tokens, {self._width}]")
        if self._held(prompt) is None:
            if self._root is not None:
                _write(self._file(self._root, prompt), prompt, embedding)
            self._remember(prompt, embedding)

    def encode_ahead(self, prompts: Sequence[str], mesh: Mesh) -> Counts:
        """Write the embeddings of distinct prompts to disk, each rank those of its share that are not there.

        A collective. Nothing is encoded without a folder, or beyond the bound. Raise UserError for a folder that cannot
        be written into.
        """
        self._encoder = bytes(mesh.all_gather_cpu(torch.tensor([[*self._encoder]], dtype=torch.uint8))[0].tolist())
        share = prompts[mesh.rank :: mesh.size]
        sizes = {prompt: held.nbytes for prompt in share if (held := self._read(prompt)) is not None}
        missing = [prompt for prompt in share if prompt not in sizes]
        if mesh.is_main and self._root is not None:
            _remove_left(self._root / self._encoder.hex()[:16])
        room, written = self._disk_bytes // mesh.size - sum(sizes.values()), 0
        if missing and room > 0 and self._root is not None:
            with closing(self._encode(missing)) as encoded:
                for prompt, embedding in zip(missing, encoded, strict=True):
                    room -= embedding.nbytes
                    if room < 0:
                        break
                    _write(self._file(self._root, prompt), prompt, embedding)
                    self._remember(prompt, embedding)
                    written += 1
        counts = torch.tensor([[len(sizes), written, len(missing) - written]])
        return Counts(*mesh.all_gather_cpu(counts).sum(0).tolist())  # waits until the files of all ranks are there

    def _held(self, prompt: str) -> Embedding | None:
        held = self._memory.get(prompt)
        return self._read(prompt) if held is None else held

    def _remember(self, prompt: str, embedding: Embedding) -> None:
        """Make a prompt the most recently used; drop the least recently used ones beyond the bound."""
        if self._memory.pop(prompt, None) is None:
            self._used += embedding.nbytes
        self._memory[prompt] = embedding
        while self._used > self._memory_bytes:
            self._used -= self._memory.pop(next(iter(self._memory))).nbytes

    def _file(self, root: Path, prompt: str) -> Path:
        name = hashlib.sha256(prompt.encode()).hexdigest()
        return root / self._encoder.hex()[:16] / name[:2] / f"{name}.safetensors"

    def _read(self, prompt: str) -> Embedding | None:
        """Read an embedding; None if there is no file, a damaged one, or one of another prompt."""
        if self._root is None:
            return None
        try:
            with safe_open(self._file(self._root, prompt), "pt") as file:
                embedding, metadata = file.get_tensor(NAME), file.metadata() or {}
        except (OSError, SafetensorError):
            return None
        whole = metadata.get("prompt") == prompt and metadata.get("crc32") == _crc32(embedding)
        return embedding if whole and self._fits(embedding) else None

    def _fits(self, embedding: Tensor) -> bool:
        """Whether these can be the numbers of an embedding of this encoder."""
        of_encoder = embedding.is_floating_point() and embedding.ndim == 2 and embedding.shape[1] == self._width
        return of_encoder and len(embedding) > 0 and bool(embedding.isfinite().all())


def _write(file: Path, prompt: str, embedding: Embedding) -> None:
    """Write an embedding atomically."""
    building = file.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(building, {NAME: embedding}, {"prompt": prompt, "crc32": _crc32(embedding)})
        building.replace(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            building.unlink()
        raise UserError(
            f"{file.parent}: embeddings of prompts cannot be written ({error}): free space, lower "
            "encoders.cache_disk_gib, or set encoders.cache to another folder"
        ) from error


def _remove_left(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed: those that nobody has written for a day."""
    for left in folder.glob("*/*.tmp"):
        with suppress(OSError):  # another run may remove it too
            if time.time() - left.stat().st_mtime > LEFT:
                left.unlink()


def _crc32(embedding: Tensor) -> str:
    return str(zlib.crc32(embedding.contiguous().view(torch.uint8).numpy()))
