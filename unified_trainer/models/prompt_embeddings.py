"""The tensors of prompts: each prompt is encoded once, and kept in memory and on disk up to a bound.

FOLDER/ENCODER/XX/HASH.safetensors   one prompt's tensors, without padding; HASH is the SHA-256 of the prompt, which
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
from safetensors import SafetensorError, safe_open

from unified_trainer.basics.errors import UserError
from unified_trainer.models.base import Prompt
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.prompt_tensors import Shapes, misfit
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.parallel.mesh import Mesh

Encode = Callable[[Sequence[str]], Generator[Prompt, None, None]]
LEFT = 86400  # seconds after which an unfinished file has no process that writes it


class Counts(NamedTuple):
    """The prompts that were encoded ahead, over all ranks."""

    found: int  # prompts that were on disk already
    encoded: int
    left: int  # prompts that `cache_disk_gib` leaves no room for


class PromptEmbeddings:
    """The tensors of prompts in the encoder's own dtypes, read from memory, from disk, or else computed.

    A file that is damaged, of another prompt, or that another encoder wrote, is never used. What one rank or run writes
    at any moment, others may read: files appear complete, under their name, or not at all.
    """

    def __init__(self, encode: Encode, encoder: str, shapes: Shapes, config: EncoderConfig) -> None:
        """`encode` yields the tensors of each prompt, of it alone and of at most `shapes`; `encoder` names it."""
        self._encode, self._shapes = encode, shapes
        self._encoder = hashlib.sha256(encoder.encode()).digest()
        self._root = Path(config.cache) if config.cache else None
        self._memory_bytes, self._disk_bytes = (
            int(gib * 2**30) for gib in (config.cache_memory_gib, config.cache_disk_gib)
        )
        self._memory: dict[str, Prompt] = {}  # the least recently used first
        self._used = 0  # bytes in memory

    @property
    def place(self) -> str:
        """The folder of the files, or memory."""
        return str(self._root or "memory")

    def rows(self, prompts: Sequence[str]) -> list[Prompt]:
        """Return the tensors of the prompts, in order."""
        known = {prompt: self._held(prompt) for prompt in dict.fromkeys(prompts)}
        if missing := [prompt for prompt, tensors in known.items() if not tensors]:
            known |= zip(missing, self._encode(missing), strict=True)
        for prompt, tensors in known.items():
            self._remember(prompt, tensors)
        return [known[prompt] for prompt in prompts]

    def store(self, prompt: str, tensors: Prompt) -> None:
        """Keep tensors that were made elsewhere, unless there are some of the prompt.

        Raise UserError for those that this encoder cannot have made.
        """
        if said := misfit(tensors, self._shapes):
            raise UserError(f"a prompt {said}")
        if not self._held(prompt):
            if self._root is not None:
                _write(self._file(self._root, prompt), prompt, tensors)
            self._remember(prompt, tensors)

    def encode_ahead(self, prompts: Sequence[str], mesh: Mesh) -> Counts:
        """Write the tensors of distinct prompts to disk, each rank those of its share that are not there.

        A collective. Nothing is encoded without a folder, or beyond the bound. Raise UserError for a folder that cannot
        be written into.
        """
        self._encoder = bytes(mesh.all_gather_cpu(torch.tensor([[*self._encoder]], dtype=torch.uint8))[0].tolist())
        share = prompts[mesh.rank :: mesh.size]
        sizes = {prompt: _nbytes(held) for prompt in share if (held := self._read(prompt))}
        missing = [prompt for prompt in share if prompt not in sizes]
        if mesh.is_main and self._root is not None:
            _remove_left(self._root / self._encoder.hex()[:16])
        room, written = self._disk_bytes // mesh.size - sum(sizes.values()), 0
        if missing and room > 0 and self._root is not None:
            with closing(self._encode(missing)) as encoded:
                for prompt, tensors in zip(missing, encoded, strict=True):
                    room -= _nbytes(tensors)
                    if room < 0:
                        break
                    _write(self._file(self._root, prompt), prompt, tensors)
                    self._remember(prompt, tensors)
                    written += 1
        counts = torch.tensor([[len(sizes), written, len(missing) - written]])
        return Counts(*mesh.all_gather_cpu(counts).sum(0).tolist())  # waits until the files of all ranks are there

    def _held(self, prompt: str) -> Prompt:
        return self._memory.get(prompt) or self._read(prompt)

    def _remember(self, prompt: str, tensors: Prompt) -> None:
        """Make a prompt the most recently used; drop the least recently used ones beyond the bound."""
        if self._memory.pop(prompt, None) is None:
            self._used += _nbytes(tensors)
        self._memory[prompt] = tensors
        while self._used > self._memory_bytes:
            self._used -= _nbytes(self._memory.pop(next(iter(self._memory))))

    def _file(self, root: Path, prompt: str) -> Path:
        name = hashlib.sha256(prompt.encode()).hexdigest()
        return root / self._encoder.hex()[:16] / name[:2] / f"{name}.safetensors"

    def _read(self, prompt: str) -> Prompt:
        """Read a file; nothing if there is none, a damaged one, or one of another prompt or of other tensors."""
        if self._root is None:
            return {}
        try:
            with safe_open(self._file(self._root, prompt), "pt") as file:
                tensors, metadata = {name: file.get_tensor(name) for name in file.offset_keys()}, file.metadata() or {}
        except (OSError, SafetensorError):
            return {}
        whole = metadata.get("prompt") == prompt and metadata.get("crc32") == _crc32(tensors)
        return tensors if whole and not misfit(tensors, self._shapes) else {}


def _write(file: Path, prompt: str, tensors: Prompt) -> None:
    """Write a file atomically."""
    building = file.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(building, tensors, {"prompt": prompt, "crc32": _crc32(tensors)})
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


def _nbytes(tensors: Prompt) -> int:
    return sum(x.nbytes for x in tensors.values())


def _crc32(tensors: Prompt) -> str:
    parts = (tensors[name].flatten().view(torch.uint8).numpy() for name in sorted(tensors))
    return str(zlib.crc32(b"".join(parts)))
