"""Folders of published models without weights: the configs of their sizes, which recipes are chosen by."""

import json
from typing import Any

from helpers import WAN
from ti2v_folder import ti2v_folder

from unified_trainer.models.hunyuan15.configs import PIPELINES

# The sizes of published models that recipes are chosen by: networks, and values of the transformers' configs.
SIZES = {
    "wan2.1-1.3b": (1, {"num_layers": 30, "num_attention_heads": 12}),
    "wan2.1-14b": (1, {"num_layers": 40, "num_attention_heads": 40}),
    "wan2.2-a14b": (2, {"num_layers": 40, "num_attention_heads": 40}),
    "wan2.2-ti2v-5b": (
        1,
        {"num_layers": 30, "num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "rope_max_seq_len": 1024},
    ),
}
SIZES["wan2.1-i2v-14b"] = (1, SIZES["wan2.1-14b"][1] | {"in_channels": 36, "image_dim": 1280})
SIZES["wan2.2-i2v-a14b"] = (2, SIZES["wan2.2-a14b"][1] | {"in_channels": 36})
SIZES["qwen-image"] = (1, {"num_layers": 60, "num_attention_heads": 24, "joint_attention_dim": 3584})
SIZES["sd3.5-medium"] = (1, {"num_layers": 24, "num_attention_heads": 24, "joint_attention_dim": 4096})
HUNYUAN15 = {"num_layers": 54, "num_attention_heads": 16, "text_embed_dim": 3584}
SIZES["hunyuanvideo-1.5"] = (1, HUNYUAN15 | {"task_type": "t2v"})
SIZES["hunyuanvideo-1.5-i2v"] = (1, HUNYUAN15 | {"task_type": "i2v"})
SIZES["ltx-video"] = (1, {"num_layers": 28, "num_attention_heads": 32, "in_channels": 128, "caption_channels": 4096})
SIZES["ltx-2"] = (1, {"num_layers": 48, "num_attention_heads": 32, "in_channels": 128, "caption_channels": 3840})


def model_folder(folder, networks: int, changes: dict[str, Any]):
    """A pipeline folder with the configs of transformers of this size but without their weights."""
    folder.mkdir()
    if "joint_attention_dim" in changes:
        return image_folder(folder, changes)
    if "text_embed_dim" in changes:
        return hunyuan15_folder(folder, changes)
    if "caption_channels" in changes:
        return ltx_folder(folder, changes)
    vae = ti2v_folder(folder / "5b") / "vae" if changes.get("in_channels") == 48 else WAN / "vae"
    (folder / "vae").symlink_to(vae)
    index = json.loads((WAN / "model_index.json").read_text())
    network = json.loads((WAN / "transformer" / "config.json").read_text()) | {"text_dim": 4096} | changes
    if networks == 2:
        index |= {"transformer_2": index["transformer"], "boundary_ratio": 0.875}
    (folder / "model_index.json").write_text(json.dumps(index))
    clip = {"model_type": "clip_vision_model", "hidden_size": 1280, "image_size": 224, "patch_size": 14}
    configs = dict.fromkeys(("transformer", "transformer_2")[:networks], network)
    configs |= {"image_encoder": clip} if "image_dim" in changes else {}
    for component, config in configs.items():
        (folder / component).mkdir()
        (folder / component / "config.json").write_text(json.dumps(config))
    return folder


def image_folder(folder, changes: dict[str, int]):
    """The same of Qwen-Image, and of Stable Diffusion 3.5."""
    if changes["joint_attention_dim"] == 4096:
        network, pipeline = {"_class_name": "SD3Transformer2DModel", "in_channels": 16}, "StableDiffusion3Pipeline"
        vae = {"_class_name": "AutoencoderKL", "latent_channels": 16, "block_out_channels": [128, 256, 512, 512]}
        vae |= {"scaling_factor": 1.5305, "shift_factor": 0.0609}
        scheduler = {"shift": 3.0}
    else:
        network, pipeline = {"_class_name": "QwenImageTransformer2DModel", "in_channels": 64}, "QwenImagePipeline"
        vae = {"_class_name": "AutoencoderKLQwenImage"}
        scheduler = {"use_dynamic_shifting": True, "max_image_seq_len": 8192, "max_shift": 0.9}
    return written(folder, pipeline, network | {"out_channels": 16} | changes, vae, scheduler)


def hunyuan15_folder(folder, changes: dict[str, Any]):
    """The same of HunyuanVideo 1.5."""
    network = {"_class_name": "HunyuanVideo15Transformer3DModel", "in_channels": 65, "out_channels": 32} | changes
    vae = {"_class_name": "AutoencoderKLHunyuanVideo15"}
    return written(folder, PIPELINES[changes["task_type"]], network, vae, {"shift": 5.0})


def ltx_folder(folder, changes: dict[str, int]):
    """The same of LTX-Video, and of LTX-2."""
    scheduler = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024}
    if changes["num_layers"] == 48:
        network, vae = (
            {"_class_name": "LTX2VideoTransformer3DModel"} | changes,
            {"_class_name": "AutoencoderKLLTX2Video"},
        )
        vae |= {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
        return written(folder, "LTX2Pipeline", network, vae, scheduler)
    network = {"_class_name": "LTXVideoTransformer3DModel"} | changes
    return written(folder, "LTXPipeline", network, {"_class_name": "AutoencoderKLLTXVideo"}, scheduler)


def written(folder, pipeline: str, network, vae, scheduler):
    configs = {"transformer/config.json": network, "vae/config.json": vae}
    configs |= {"scheduler/scheduler_config.json": scheduler, "model_index.json": {"_class_name": pipeline}}
    for name, config in configs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(config))
    return folder
