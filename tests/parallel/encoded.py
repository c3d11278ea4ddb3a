"""What the ranks of tests/parallel/test_encode_ahead.py do.

Each has a copy of its own of a pipeline folder, as on the disks of two nodes, with other file times.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.parallel.mesh import Mesh, ParallelConfig

PROMPTS = [f"a {color} {shape}" for color in ("red", "green", "blue") for shape in ("circle", "square", "triangle")]


def work(wan: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    mesh = Mesh.join("cpu", ParallelConfig())
    own = folder / f"wan{mesh.rank}"
    shutil.copytree(wan, own)
    os.utime(own / "text_encoder" / "model.safetensors", (mesh.rank, mesh.rank))
    codec = WanCodec.load(own, mesh.device, EncoderConfig(cache=str(folder / "cache"), cache_memory_gib=0))
    asked: list[str] = []
    embed = codec._embeddings._encode
    codec._embeddings._encode = lambda prompts: asked.extend(prompts) or embed(prompts)
    said = codec.encode_ahead(PROMPTS, mesh)
    save_file({"text": codec.encode_text(PROMPTS)["text"]}, folder / f"{mesh.rank}.safetensors")
    (folder / f"{mesh.rank}.json").write_text(json.dumps({"asked": asked, "said": said}))
    mesh.leave()
