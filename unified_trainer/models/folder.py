"""Reading model folders: whole or not at all."""

from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open

M = TypeVar("M")


def check_component(folder: Path, weights: str) -> None:
    """Raise FileNotFoundError or ValueError, naming the file, unless config and weights are there and whole."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'} is missing: not a folder that save_pretrained has finished")
    files = sorted(folder.glob(f"{weights}*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no {weights}*.safetensors: half-written, or downloaded without weights"
        )
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short ({error}): fetch or write it again") from error


def load_strictly(kind: type[M], folder: Path, weights: str = "diffusion_pytorch_model") -> M:
    """A model in float32 with exactly the keys and shapes of its config, all weights finite."""
    check_component(folder, weights)
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise ValueError(f"{folder}: {what.replace('_', ' ')} {sorted(map(str, info[what]))[:5]}")
    for name, weight in model.state_dict().items():
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{folder}: weight {name} holds a value that is not finite")
    return model.float()
