"""The negative prompt's embedding beside encoded clips, so that training on them need not encode it again."""

from pathlib import Path

from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.models.base import Codec
from unified_trainer.models.tensor_file import write_tensors

FILE = "negative_prompt.safetensors"  # one tensor, NAME; metadata: the prompt, and the fingerprint of its text encoder
NAME = "embedding"


def write_negative_prompt(folder: Path, prompt: str, embedding: Float[Tensor, "n d"], text_encoder: str) -> None:
    """Write the embedding of a prompt atomically, with the fingerprint of what made it."""
    building = folder / f"{FILE}.tmp"
    write_tensors(building, {NAME: embedding.contiguous()}, {"prompt": prompt, "text_encoder": text_encoder})
    building.replace(folder / FILE)


def use_negative_prompt(folder: Path, prompt: str, codec: Codec) -> bool:
    """Give the codec the embedding in a folder, if it is there and of this prompt and text encoder; return whether.

    Raise UserError for a file that is damaged.
    """
    if not (folder / FILE).is_file():
        return False
    try:
        with safe_open(folder / FILE, "pt") as file:
            metadata, embedding = file.metadata() or {}, file.get_tensor(NAME)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / FILE} is damaged ({error}): remove it") from error
    if (metadata.get("prompt"), metadata.get("text_encoder")) != (prompt, codec.text_fingerprint):
        return False
    try:
        codec.remember(prompt, embedding)
    except UserError as error:
        raise UserError(f"{folder / FILE} is damaged ({error}): remove it") from error
    return True
