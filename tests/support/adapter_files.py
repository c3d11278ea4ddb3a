"""Adapters in every layout, made from one set of factors."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unified_trainer.models.wan.lora import published_layer

Factors = dict[str, tuple[Tensor, Tensor]]  # A and B by the network's names of layers
ENDS = ("to_q", "to_out.0", "ffn.net.2")


def factors(network: nn.Module, rank: int = 3, ends: tuple[str, ...] = ENDS, seed: int = 0) -> Factors:
    """Random factors of the linear layers with these ends of names."""
    random = torch.Generator().manual_seed(seed)
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{end}" for end in ends))
    }
    assert layers
    return {
        name: (
            0.2 * torch.randn(rank, module.in_features, generator=random),
            0.2 * torch.randn(module.out_features, rank, generator=random),
        )
        for name, module in layers.items()
    }


def by_hand(weights: dict[str, Tensor], given: Factors, scales: dict[str, float]) -> dict[str, Tensor]:
    """W + scale B A."""
    changed = {f"{layer}.weight": scales[layer] * b @ a for layer, (a, b) in given.items()}
    return {key: weight + changed[key] if key in changed else weight for key, weight in weights.items()}


def named(given: Factors, name: str, down: str, up: str) -> dict[str, Tensor]:
    pairs = {name.format(layer): pair for layer, pair in given.items()}
    return {f"{layer}.{down}": a for layer, (a, _) in pairs.items()} | {
        f"{layer}.{up}": b.contiguous() for layer, (_, b) in pairs.items()
    }


def wans(given: Factors) -> Factors:
    """By Wan's own names of layers."""
    return {published_layer(layer): pair for layer, pair in given.items()}


def peft(folder: Path, given: Factors, alpha: float, **settings: object) -> Path:
    rank = len(next(iter(given.values()))[0])
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(given), **settings}
    return _folder(folder, "adapter_model", named(given, "base_model.model.{}", *AB), config=config)


def diffusers(folder: Path, given: Factors, alpha: float, component: str = "transformer") -> Path:
    rank = len(next(iter(given.values()))[0])
    settings = {f"{component}.r": rank, f"{component}.lora_alpha": alpha, f"{component}.target_modules": list(given)}
    held = named(given, f"{component}.{{}}", *AB)
    return _folder(folder, "pytorch_lora_weights", held, metadata={"lora_adapter_metadata": json.dumps(settings)})


def diffusers_without_settings(folder: Path, given: Factors, alpha: float) -> Path:
    """Its scale is 1, so that it is in the factors."""
    rank = len(next(iter(given.values()))[0])
    folded = {layer: (a, alpha / rank * b) for layer, (a, b) in given.items()}
    return _folder(folder, "pytorch_lora_weights", named(folded, "transformer.{}", *AB))


def old_diffusers(folder: Path, given: Factors, alpha: float) -> Path:
    held = named(given, "transformer.{}", "lora.down.weight", "lora.up.weight")
    return _folder(folder, "old", held | {f"transformer.{layer}.alpha": torch.tensor(alpha) for layer in given})


def fastvideo_extracted(folder: Path, given: Factors, alpha: float) -> Path:
    rank = len(next(iter(given.values()))[0])
    folded = {layer: (a, alpha / rank * b) for layer, (a, b) in given.items()}
    return _folder(folder, "adapter_r3", named(folded, "{}", *AB))


def fastvideo_trained(folder: Path, given: Factors, alpha: float) -> Path:
    held = named(given, "{}", "lora_A", "lora_B")
    return _folder(folder, "diffusion_pytorch_model", held | {f"{x}.lora_alpha": torch.tensor(alpha) for x in given})


def published(folder: Path, given: Factors, alpha: float) -> Path:
    held = named(wans(given), "diffusion_model.{}", "lora_down.weight", "lora_up.weight")
    return _folder(folder, "wan", held | {f"diffusion_model.{x}.alpha": torch.tensor(alpha) for x in wans(given)})


def kohya(folder: Path, given: Factors, alpha: float) -> Path:
    flat = {layer.replace(".", "_"): pair for layer, pair in wans(given).items()}
    held = named(flat, "lora_unet_{}", "lora_down.weight", "lora_up.weight")
    return _folder(folder, "musubi", held | {f"lora_unet_{layer}.alpha": torch.tensor(alpha) for layer in flat})


AB = ("lora_A.weight", "lora_B.weight")
LAYOUTS = {
    writer.__name__: writer
    for writer in (
        peft,
        diffusers,
        diffusers_without_settings,
        old_diffusers,
        fastvideo_extracted,
        fastvideo_trained,
        published,
        kohya,
    )
}


def _folder(
    folder: Path,
    name: str,
    held: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
    config: dict[str, object] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(held, folder / f"{name}.safetensors", metadata={"format": "pt"} | (metadata or {}))
    if config:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
