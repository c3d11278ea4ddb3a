"""Quantised networks: the linear layers of the blocks compute in int8, int4, fp8 or nvfp4, rounded by torchao.

A network is wrapped when it is opened, in one of three forms. `weights`: the weights of a frozen network are rounded
once. `aware`: each pass rounds as a deployed network does. `products`: the products of a trained network are in fp8.
torchao takes seconds to import: import this module where it is used.
"""

import importlib
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin
from diffusers.quantizers import DiffusersAutoQuantizer
from diffusers.quantizers.quantization_config import TorchAoConfig
from diffusers.quantizers.torchao import torchao_quantizer
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.models.adapter_file import AdapterFile
from unified_trainer.models.aware_linear import AwareLinear
from unified_trainer.models.base import VideoModel
from unified_trainer.models.folder import read_pretrained
from unified_trainer.models.layout import reading_config
from unified_trainer.parallel.mesh import Mesh

for name in ("torchao", "torch.utils._pytree", torchao_quantizer.__name__):  # notes on kernels that nothing here calls
    logging.getLogger(name).setLevel(logging.ERROR)

from torchao import float8, quantization  # noqa: E402
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig, kernels  # noqa: E402
from torchao.quantization import quant_primitives as primitives  # noqa: E402
from torchao.utils import TorchAOBaseTensor  # noqa: E402

# It was left out when diffusers was imported.
vars(diffusers.utils)["is_torchao_available"] = diffusers.utils.import_utils.is_torchao_available
importlib.reload(torchao_quantizer)

GROUP = 32  # weights of a row that share one scale in int4
# What numbers of inputs and outputs of a layer must be divisible by.
DIVISORS = {"int8": (1, 1), "int4": (GROUP, 1), "fp8": (16, 16), "nvfp4": (16, 16)}
INT8 = {"scale_dtype": torch.float32, "eps": torch.finfo(torch.float32).eps}
SMALLEST = 1e-12  # of what a scale is made of: a row of zeros stays zero
E4M3, LARGEST_FP4 = torch.finfo(torch.float8_e4m3fn), 6.0


def config_of(kind: str) -> Any:
    """Return torchao's config of a kind, which diffusers reads in a config.json."""
    row = {"granularity": quantization.PerRow(), "set_inductor_config": False}
    if kind == "int8":
        return quantization.Int8DynamicActivationInt8WeightConfig(**row)
    if kind == "int4":
        return quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(GROUP))
    if kind == "fp8":
        return quantization.Float8DynamicActivationFloat8WeightConfig(activation_value_lb=SMALLEST, **row)
    return NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)


def linear_layers(model: VideoModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's blocks by name."""
    inside = {id(module) for block in model.blocks for module in block.modules()}
    named = model.network.named_modules()
    return {name: layer for name, layer in named if id(layer) in inside and isinstance(layer, nn.Linear)}


def check_sizes(model: VideoModel, kind: str, key: str) -> None:
    """Raise UserError, naming the key, for a layer whose size does not divide into what shares a scale."""
    divisors = DIVISORS[kind]
    for name, layer in linear_layers(model).items():
        if layer.in_features % divisors[0] or layer.out_features % divisors[1]:
            raise UserError(
                f"{key} {kind}: layer {name} has {layer.in_features} inputs and {layer.out_features} outputs, which "
                f"must be divisible by {divisors[0]} and {divisors[1]}: set int8"
            )


def wrap(model: VideoModel, kind: str, form: str, mesh: Mesh) -> Mesh:
    """Quantise a network that was opened and not read, and return the mesh to load it on.

    Rounded weights are not sharded: every rank holds them whole.
    """
    layers = linear_layers(model)
    if form == "weights":
        model.read = partial(_read_and_round, model.read, [*layers.values()], kind)  # type: ignore[method-assign]
        return replace(mesh, weights=None)
    if form == "products":  # scales by row: those of a whole tensor would depend on the other samples of a batch
        config = float8.Float8LinearConfig.from_recipe_name("rowwise")
        float8.convert_to_float8_training(model.network, config=config, module_filter_fn=lambda _, name: name in layers)
        return mesh
    for layer in layers.values():
        layer.__class__ = AwareLinear
        layer.round_weight, layer.round_inputs = partial(round_to, kind), partial(round_to, kind, inputs=True)
    return mesh


def _read_and_round(
    read: Callable[..., None], layers: list[nn.Linear], kind: str, mesh: Mesh, merged: AdapterFile | None = None
) -> None:
    read(mesh, merged)
    for layer in layers:
        quantization.quantize_(layer, config_of(kind))


def round_to(kind: str, x: Tensor, *, inputs: bool = False) -> Tensor:
    """Round as torchao's tensors of a kind do: int8 and fp8 with a scale a row, int4 one for 32 weights of a row.

    nvfp4 has one for 16 numbers, and one above it: of the weight, or of the inputs of each sample. The inputs of int4
    stay as they are.
    """
    if kind == "int4" and inputs:
        return x
    if kind == "nvfp4":
        return _round_to_nvfp4(x, inputs=inputs)
    row = (1,) * (x.dim() - 1)
    if kind == "fp8":
        scale = primitives._choose_scale_float8(x, [*row, x.shape[-1]], hp_value_lb=SMALLEST)
        in_fp8 = primitives._quantize_affine_float8(x, scale, torch.float8_e4m3fn)
        return primitives._dequantize_affine_float8(in_fp8, scale, x.dtype)
    size, low, how = (x.shape[-1], -128, INT8) if kind == "int8" else (GROUP, -8, {})
    block, bounds = (*row, size), (low, -low - 1)
    scale, zero = primitives.choose_qparams_affine(
        x, primitives.MappingType.SYMMETRIC, block, torch.int8, *bounds, zero_point_dtype=torch.int8, **how
    )
    return primitives._fake_quantize_affine(x, block, scale, zero, torch.int8, *bounds)


def _round_to_nvfp4(x: Tensor, *, inputs: bool) -> Tensor:
    blocks = x.float().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    over = tuple(range(int(inputs), largest.dim()))  # of inputs all but the samples
    whole = largest.amax(over, keepdim=True).clamp_min(SMALLEST) / (E4M3.max * LARGEST_FP4)
    scale = (largest / LARGEST_FP4 / whole).clamp(E4M3.tiny, E4M3.max).to(torch.float8_e4m3fn).float()
    in_fp4 = kernels.f32_to_f4_unpacked((blocks * (1 / whole / scale)).clamp(-LARGEST_FP4, LARGEST_FP4))
    return (kernels.f4_unpacked_to_f32(in_fp4) * (whole * scale)).flatten(-2).to(x)


def quantise_folder(network: nn.Module, layers: Collection[str], place: Path, kind: str) -> None:
    """Round the weights of these layers of a network, and write it in the place of its component for diffusers.

    UserError unless it reads back as it was written.
    """
    quantizer = DiffusersAutoQuantizer.from_config(TorchAoConfig(config_of(kind)), pre_quantized=True)
    quantizer.validate_environment()
    for name in layers:
        quantization.quantize_(network.get_submodule(name), config_of(kind))
    network.hf_quantizer = quantizer
    network.register_to_config(quantization_config=quantizer.quantization_config)
    network.save_pretrained(place)
    for file in place.glob("*.safetensors"):  # as in `DiffusersModel.save`
        file.chmod((place / "config.json").stat().st_mode)
    read = _read(type(network), place, network.dtype).state_dict()
    for key, weight in network.state_dict().items():
        if type(weight) is not type(read[key]) or not torch.equal(_plain(weight), _plain(read[key])):
            raise UserError(f"{place}: {key} is not written as it is in memory; check the disk")


def open_quantised(kind: type[ModelMixin], place: Path) -> tuple[nn.Module, Callable[..., None]]:
    """Return a network whose quantised weights were read from a component, and what takes the place of reading it."""
    network = _read(kind, place, torch.float32)

    def move(mesh: Mesh, merged: AdapterFile | None = None) -> None:
        if merged is not None or mesh.weights is not None:
            what = f"adapter {merged.name} cannot be added to" if merged is not None else "several ranks cannot share"
            raise UserError(f"{place}: {what} quantised weights; take the export without --quantize")
        network.to(mesh.device)

    return network, move


def _read(kind: type[ModelMixin], place: Path, dtype: torch.dtype) -> Any:
    with reading_config(place / "config.json", kind.__name__):
        return read_pretrained(kind, place, torch_dtype=dtype)


def _plain(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, TorchAOBaseTensor) else weight
