"""The location of an adapter that was made elsewhere: which file of a folder, and which part of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.models.adapter_settings import FASTVIDEO_CONFIG, PEFT_CONFIG
from unified_trainer.models.hub import is_hub_id
from unified_trainer.models.tensor_file import SAVED, opened

PEFT, DIFFUSERS = "adapter_model.safetensors", "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Location:
    """Where the adapter of one network lies."""

    file: Path
    component: str = ""  # its part of a file that holds two networks; "": the file holds one network
    factor: float = 1.0  # of what is added

    @property
    def settings(self) -> tuple[Path, ...]:
        """The files of settings beside it, unless their usual weights lie there too and are not this file."""
        usual = {PEFT_CONFIG: PEFT, FASTVIDEO_CONFIG: DIFFUSERS}
        mine = (name for name, own in usual.items() if self.file.name == own or not (self.file.parent / own).is_file())
        return tuple(file for name in mine if (file := self.file.parent / name).is_file())

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file, *self.settings)


def locate(path: Path, key: str, expert: int | None, components: Sequence[str], names: Sequence[str]) -> Location:
    """Return where the adapter of a role's only network (`expert` None) or of one of its two experts lies.

    `key` is the setting, for messages; `components` and `names` are what the family calls the networks and the files of
    two experts, high noise first. Raise UserError for a path that is missing or leaves a choice.
    """
    if path.is_dir():
        if expert is not None and (path / components[expert]).is_dir():
            return locate(path / components[expert], key, None, components, names)
        if expert is not None and (path / f"{names[expert]}.safetensors").is_file():
            return Location(path / f"{names[expert]}.safetensors")
        path = _only_file(path, key)
    if not path.is_file():
        hint = f"; if it is on the hub, run `hf download {path}` and name the file" if is_hub_id(str(path)) else ""
        raise MissingFileError(f"{key} {path}: no such file or folder{hint}")
    if path.suffix not in (".safetensors", *SAVED):
        raise UserError(f"{key} {path} is no safetensors file: convert it, or name a folder or file that is one")
    component = ""
    if expert is not None:
        with opened(path) as held:
            if not any(name.startswith(f"{components[1]}.") for name in held.offset_keys()):
                raise UserError(
                    f"{key} {path} is the adapter of one network, but the role has two experts: name a file for each "
                    f"with {key.replace('.adapter', '.high.adapter')} and {key.replace('.adapter', '.low.adapter')}"
                )
        component = components[expert]
    return Location(path, component)


def checksum(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the files' contents, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _only_file(folder: Path, key: str) -> Path:
    for name in (PEFT, DIFFUSERS):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.safetensors")) or sorted(file for file in folder.iterdir() if file.suffix in SAVED)
    if len(files) != 1:
        held = f"several: {', '.join(file.name for file in files)}" if files else "none"
        raise UserError(f"{key} {folder} must hold one safetensors file, but holds {held}; name the file itself")
    return files[0]
