"""Causal students with a condition image, as runs: every method of them trains, streams are whole, exports agree."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils
from helpers import ALONE
from test_i2v import GROUPS, KINDS, PROMPTS, REWARD, SINGLE, folders, picture, table, words  # noqa: F401 - fixtures

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Image, Request
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.family import WAN
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import pieces, videos, with_images

pytestmark = pytest.mark.slow

LONG = {"video__frames": 13}  # four latent frames
CHUNKS = {"sampler__chunks.chunk-frames": 1, "sampler__chunks.window-frames": 2, "sampler__chunks.sink-frames": 1}
MATCHING = SINGLE | {"algorithm__student-every": 1}
FIRST = {"data__first-frame": True, "data__num-clips": 2}
WINDOWS = MATCHING | LONG | {"algorithm__teacher-frames": 2, "video__frames": 17}
OF_EACH = {
    "finetune": SINGLE | LONG | FIRST | {"algorithm__forcing": "teacher", "video__frames": 17},
    "ode_init": SINGLE | {"algorithm__teacher-steps": 3},
    "self_forcing": MATCHING | LONG | {"sampler__chunks.independent-first-frame": True},
    "long_self_forcing": WINDOWS,
    "streaming_tuning": WINDOWS,
    "dance_grpo": GROUPS | REWARD,
}


SPARSE = ["--student.sparse-attention.share", "0.5", "--student.sparse-attention.tile", "1", "2", "2"]


def trained(
    kind_folder: Path,
    table: Path,  # noqa: F811
    output: Path,
    method: str,
    *own: str,
    **more: object,
) -> Path:
    assert main([*words(method, kind_folder, table, output, **CHUNKS | more), *own]) == 0
    return output


@pytest.mark.parametrize("method", OF_EACH)
def test_methods_of_causal_students_train_from_an_image(folders, table, tmp_path, method):  # noqa: F811
    """dance_grpo also compares its cached rollout with the masked replay, before its first update."""
    more = OF_EACH[method]
    run = trained(folders["ti2v"], table, tmp_path / "run", method, **more)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    norms = [value for row in rows for key, value in row.items() if key == "train/student/grad_norm"]
    assert norms and all(0 < value < 1e6 for value in norms)


@pytest.mark.parametrize(("kind", "own"), [*((kind, []) for kind in KINDS), ("ti2v", SPARSE)])
def test_a_stream_and_an_export_make_the_videos_of_sample(folders, table, tmp_path, monkeypatch, kind, own):  # noqa: F811
    """Bit for bit, with sparse attention too; the first latent frame of TI2V is its image."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    more = MATCHING | LONG | ({"sampler__chunks.independent-first-frame": True} if kind == "ti2v" else {})
    run = trained(folders[kind], table, tmp_path / "run", "self_forcing", *own, **more)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    role = load_role(str(run), "student", None, ALONE, causal=True)
    requests = with_images(role, [str(table)], [])
    ours = torch.cat(list(videos(role, requests, 5, 2)))
    (stream,) = pieces(role, requests, 5, 2, by_chunk=True)
    assert torch.equal(torch.cat(list(stream), 2), ours)
    unlike = torch.cat(list(videos(role, [Request(one.text, requests[0].images) for one in requests], 5, 2)))
    assert float((unlike - ours)[1, :, 1:].abs().max()) > 1e-3 and torch.equal(unlike[0], ours[0])
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", custom_pipeline="pipeline", trust_remote_code=True)
    pictures = [picture(table.parent / f"{number}.png") for number in range(2)]
    noise = [torch.Generator().manual_seed(5 + number) for number in range(2)]
    made = pipe(list(PROMPTS), image=pictures, generator=noise, output_type="pt").frames.movedim(1, 2)
    torch.testing.assert_close(made, ours, rtol=0, atol=0)
    if kind == "ti2v":
        codec = WAN.codec(folders[kind], torch.device("cpu"), EncoderConfig())
        image = Image.read(table.parent / "0.png", "the test")
        first = codec.decode(codec.encode_images([(image,)], codec.latent_shape(1, 64, 64))["image"])
        torch.testing.assert_close(ours[:1, :, :1], first, rtol=0, atol=1e-5)
