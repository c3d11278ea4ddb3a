"""The negative prompt's tensors beside encoded clips, so that training on them need not encode it again."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from unified_trainer.basics.errors import UserError
from unified_trainer.models.base import Codec
from unified_trainer.models.tensor_file import write_tensors

FILE = "negative_prompt.safetensors"  # metadata: the prompt, and the fingerprint of its text encoder


def write_negative_prompt(folder: Path, prompt: str, codec: Codec) -> None:
    """Write the tensors of a prompt atomically, with the fingerprint of what made them."""
    building = folder / f"{FILE}.tmp"
    prompt = codec.negative(prompt)
    write_tensors(building, codec.prompts([prompt])[0], {"prompt": prompt, "text_encoder": codec.text_fingerprint})
    building.replace(folder / FILE)


def use_negative_prompt(folder: Path, prompt: str, codec: Codec) -> bool:
    """Give the codec the tensors in a folder, if they are there and of this prompt and text encoder; return whether.

    Raise UserError for a file that is damaged.
    """
    if not (folder / FILE).is_file():
        return False
    prompt = codec.negative(prompt)
    try:
        with safe_open(folder / FILE, "pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / FILE} is damaged ({error}): remove it") from error
    known = metadata.get("prompt"), metadata.get("text_encoder"), tensors.keys()
    if known != (prompt, codec.text_fingerprint, codec.text_shapes.keys()):  # earlier versions had another name
        return False
    try:
        codec.remember(prompt, tensors)
    except UserError as error:
        raise UserError(f"{folder / FILE} is damaged ({error}): remove it") from error
    return True
