"""Students with actions as runs: every method of them trains, goes on and is sampled, and wrong rows are refused."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils
from forked import program
from helpers import (
    ALONE,
    REPO,
    SMALL,
    assert_one_training,
    assert_same,
    checkpoint_of,
    cut_off,
    flags,
    metrics_of,
    small_model,
    small_pipeline,
)
from safetensors.torch import save_file

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.prompts import read_prompts
from unified_trainer.data.video_files import write_mp4
from unified_trainer.models.base import ActionForm
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.actions import with_actions
from unified_trainer.models.wan.family import WAN
from unified_trainer.models.wan.model import WanModel
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.export.adapters import extract_adapter
from unified_trainer.tools.export.export import export
from unified_trainer.tools.load_run import load_folder, load_role
from unified_trainer.tools.plan.estimate import estimate
from unified_trainer.tools.sample.latents import Stream
from unified_trainer.tools.sample.sample import pieces, read_lines, videos

sys.path.insert(0, str(REPO / "scripts"))
import bench_plan

pytestmark = pytest.mark.slow

SIZE = 3
CHUNKS = {"sampler.chunks.chunk-frames": 1, "sampler.chunks.window-frames": 2, "sampler.chunks.sink-frames": 1}
SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
MATCHING = SINGLE | {"algorithm.student-every": 1, "video.height": 32, "video.width": 32, "sampler.num-steps": 2}
OF_EACH = {
    "dmd2": MATCHING | {"video.frames": 5},
    "ode_init": MATCHING | CHUNKS | {"video.frames": 13, "algorithm.teacher-steps": 3},
    "self_forcing": MATCHING | CHUNKS | {"video.frames": 13},
    "long_self_forcing": MATCHING | CHUNKS | {"video.frames": 13, "algorithm.teacher-frames": 2},
    "streaming_tuning": MATCHING | CHUNKS | {"video.frames": 13, "algorithm.teacher-frames": 2},
}
OF_EACH["ode_init"] = {key: value for key, value in OF_EACH["ode_init"].items() if "student-every" not in key}


def acts(frames: int, seed: int = 0) -> list[list[float]]:
    return torch.randn(frames, SIZE, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a small network that takes actions, with a layer that is not zero."""
    folder = small_pipeline(tmp_path_factory.mktemp("acting") / "model")
    acting = with_actions(WanModel)(small_model().network, None, ActionForm(SIZE, 4))
    for weight in acting._layer.parameters():
        weight.data = 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    acting.network.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A function that writes prompts with actions of so many frames: a list, and the two kinds of files."""

    def written(frames: int):
        folder = tmp_path_factory.mktemp("prompts")
        np.save(folder / "one.npy", np.array(acts(frames, 1)))
        save_file({"actions": torch.tensor(acts(frames, 2)), "other": torch.ones(1)}, folder / "two.safetensors")
        cells = [acts(frames), "one.npy", "two.safetensors"]
        rows = [json.dumps({"prompt": f"a {i} circle", "actions": cell}) for i, cell in enumerate(cells)]
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        return folder / "prompts.jsonl"

    return written


def clips_of(folder, actions=None):
    """Two videos of five frames, with a table of their actions."""
    folder.mkdir(exist_ok=True)
    with (folder / "captions.jsonl").open("w") as lines:
        for number in range(2):
            frames = np.random.default_rng(number).integers(0, 255, (5, 32, 32, 3), dtype=np.uint8)
            write_mp4(frames, folder / f"{number}.mp4", 8)
            given = {} if actions is None else {"actions": actions(number)}
            lines.write(json.dumps({"path": f"{number}.mp4", "caption": f"a {number} circle"} | given) + "\n")
    return folder


def words_of(method: str, model, **more: object) -> list[str]:
    own = {"method": method, "recipe": "tiny", "student.path": model, "steps": 2, "validate-every": 0, "device": "cpu"}
    return flags(own | {"checkpoint-every": 1, "keep-last": 9} | {key.replace("__", "."): v for key, v in more.items()})


@pytest.mark.parametrize("method", OF_EACH)
def test_methods_train_with_actions_and_resume_bit_for_bit(model, table, tmp_path, method):
    own = OF_EACH[method]
    words = words_of(method, model, prompts=table(own["video.frames"])) + flags(own)
    assert main([*words, "--output", str(tmp_path / "one")]) == 0
    assert main(["--resume", str(cut_off(tmp_path / "one", tmp_path / "half", 1))]) == 0
    ours, theirs = checkpoint_of(tmp_path / "half", 2), checkpoint_of(tmp_path / "one", 2)
    assert_same(ours, theirs)
    norms = [row["train/student/grad_norm"] for row in metrics_of(tmp_path / "one")]
    assert norms and all(0 < norm < 1e6 for norm in norms)


def test_grpo_of_a_causal_student_replays_its_actions(model, table, tmp_path):
    """Before its first update the log-densities of rollout and replay agree."""
    words = [*SMALL["dance_grpo"], *flags(CHUNKS | {"student.path": model, "prompts": table(5)})]
    assert main([*words, "--output", str(tmp_path / "run"), "--reward.frames", "all"]) == 0


LORA = SINGLE | {"video.frames": 5, "video.height": 32, "video.width": 32, "video.fps": 8, "sampler.num-steps": 2}
LORA |= {"student.action-size": SIZE, "student.adapter.rank": 2, "student.learning-rate": 1e-2}


def lora_of(tmp_path) -> list[str]:
    """Words of a run that gives a plain network a layer of actions, beside an adapter of its other layers."""
    clips = clips_of(tmp_path / "clips", lambda number: acts(5, number))
    return words_of("finetune", small_pipeline(tmp_path / "plain"), data__path=clips) + flags(LORA)


def test_an_adapter_and_a_new_layer_resume_and_are_exported_together(table, tmp_path):
    """The export has the adapter merged and the layer, and is sampled as the run is."""
    assert main([*lora_of(tmp_path), "--output", str(tmp_path / "one")]) == 0
    assert main(["--resume", str(cut_off(tmp_path / "one", tmp_path / "half", 1))]) == 0
    weights = checkpoint_of(tmp_path / "one", 2)
    assert_same(checkpoint_of(tmp_path / "half", 2), weights)
    trained = {key.rpartition(".")[0] for key in weights if key.startswith("student/weights/")}
    assert "student/weights/condition_embedder.action_proj" in trained and len(trained) > 1

    assert main(["export", str(tmp_path / "one"), str(tmp_path / "out")]) == 0
    run = load_role(str(tmp_path / "one"), "student", None, ALONE, causal=True)
    exported = load_folder(str(tmp_path / "out"), run.run, ALONE)
    (ours,), (theirs,) = (videos(one, read_lines([str(table(5))]), 3, 8) for one in (run, exported))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="leave --quantize, --adapter and --layout out"):
        export(str(tmp_path / "one"), tmp_path / "peft", adapter="peft")
    with pytest.raises(UserError, match=r"have other weights, such as condition_embedder\.action_proj\.bias"):
        extract_adapter(str(tmp_path / "out"), tmp_path / "factors", str(tmp_path / "plain"))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["causal", "adapter"])
def test_two_ranks_train_as_one(model, table, tmp_path, kind):
    causal = words_of("self_forcing", model, prompts=table(13)) + flags(OF_EACH["self_forcing"])
    words = causal if kind == "causal" else lora_of(tmp_path)
    assert main([*words, "--output", str(tmp_path / "one")]) == 0
    done = program("-m", "unified_trainer", *words, "--output", tmp_path / "two", ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 2)


def test_finetune_gives_a_plain_network_actions_from_videos_and_from_encoded_clips(tmp_path):
    """Both train the same weights, of which the new layer is one; an export of it takes actions."""
    source, plain = clips_of(tmp_path / "clips", lambda number: acts(5, number)), small_pipeline(tmp_path / "model")
    small = {"video.frames": 5, "video.height": 32, "video.width": 32, "video.fps": 8}
    encode = ["preprocess", str(source), str(tmp_path / "encoded"), "--model", str(plain), "--recipe", "tiny"]
    assert main([*encode, *flags(small)]) == 0
    small |= SINGLE | {"student.action-size": SIZE}
    for name, path in (("raw", source), ("stored", tmp_path / "encoded")):
        words = words_of("finetune", plain, data__path=path) + flags(small)
        assert main([*words, "--output", str(tmp_path / name)]) == 0
    raw, stored = (checkpoint_of(tmp_path / name, 2) for name in ("raw", "stored"))
    layer = [key for key in raw if key.endswith("action_proj.weight") and "/weights/" in key]
    assert layer and all(raw[key].any() for key in layer)
    torch.testing.assert_close(stored[layer[0]], raw[layer[0]], rtol=0, atol=1e-4)
    assert main(["export", str(tmp_path / "raw"), str(tmp_path / "out")]) == 0
    assert WAN.actions(tmp_path / "out", 0) == ActionForm(SIZE, 4) and WAN.actions(plain, 0) is None
    one_frame = load_role(str(tmp_path / "raw"), "student", None, ALONE, causal=False, flags=["--video.frames", "1"])
    assert one_frame.actions == ActionForm(SIZE, 4)


def test_plan_counts_the_layer_of_actions(model, table, tmp_path):
    """Calls and FLOPs are those of a real step; the layer is trained beside an adapter where the folder lacks it."""
    words = words_of("dmd2", model, prompts=table(5)) + flags(OF_EACH["dmd2"])
    real, (planned, passes) = bench_plan.measure(words, 1, memory=False), bench_plan.predicted(words, 1)
    assert passes == real.passes and planned.model_flops == pytest.approx(real.flops, rel=1e-9)
    plain, adapter = small_pipeline(tmp_path / "plain"), ["--student.adapter.rank", "2"]
    new = ["--student.path", str(plain), "--student.action-size", str(SIZE)]
    finetune = words_of("finetune", model)
    held, given, none = (
        estimate(parse([*finetune, *adapter, *more]), 1) for more in ([], new, ["--student.path", str(plain)])
    )
    layer = small_model().feature_size * (4 * SIZE + 1)
    assert held.parameters["student"] == given.parameters["student"] == none.parameters["student"] + layer
    assert given.memory.always["moments"] == held.memory.always["moments"] + 8 * layer
    assert held.memory.always["moments"] == none.memory.always["moments"]
    with pytest.raises(UserError, match="actions of different sizes"):
        estimate(parse([*words_of("dmd2", model), *new, "--teacher.path", str(plain)]), 1)


def test_a_stream_and_an_export_make_the_videos_of_sample(model, table, tmp_path, monkeypatch):
    """A stream bit for bit that of `sample --stream`."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    prompts = table(13)
    words = words_of("self_forcing", model, prompts=prompts) + flags(OF_EACH["self_forcing"] | {"steps": 1})
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    loaded = load_role(str(tmp_path / "run"), "student", None, ALONE, causal=True)
    requests = read_lines([str(prompts)])
    (expected,) = videos(loaded, requests, 3, 8)
    (parts,) = pieces(loaded, requests, 3, 8, by_chunk=True)
    by_chunk = torch.cat(list(parts), 2)
    torch.testing.assert_close(by_chunk, expected, rtol=0, atol=1e-6)  # a VAE rounds parts in its own way
    codec = WAN.codec(loaded.base, ALONE.device, EncoderConfig())
    stream = Stream(loaded, codec, [Request(request.text) for request in requests], [3, 4, 5], loaded.actions)
    actions, made, done = torch.tensor([acts(13, i) for i in range(3)]), [], 0
    while done < 13:
        rows = actions[:, done : done + stream.frames]
        made.append(stream.decode(stream.next(actions=rows)))
        done += rows.shape[1]
    assert torch.equal(torch.cat(made, 2), by_chunk)
    other = torch.stack([actions[1], actions[0], actions[2]]).numpy()
    np.save(tmp_path / "shared.npy", other[0])
    shared = ["--actions", str(tmp_path / "shared.npy"), "--output", str(tmp_path / "samples"), "--stream"]
    assert main(["sample", str(tmp_path / "run"), "--prompts", "a red circle", *shared]) == 0

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", custom_pipeline="pipeline", trust_remote_code=True)
    pipe.set_progress_bar_config(disable=True)
    texts = [request.text for request in requests]
    seeds = [torch.Generator().manual_seed(3 + i) for i in range(3)]
    ours = pipe(texts, generator=seeds, output_type="pt", actions=actions).frames
    torch.testing.assert_close(ours.transpose(1, 2), expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"takes finite actions of the shape \(3, 13, 3\), not None"):
        pipe(texts, generator=seeds)
    with pytest.raises(UserError, match="leave --quantize, --adapter and --layout out"):
        export(str(tmp_path / "run"), tmp_path / "native", layout="wan")


def rows(folder, *cells: object):
    lines = [{"prompt": f"a {i} circle"} | ({} if cell is None else {"actions": cell}) for i, cell in enumerate(cells)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "prompts.jsonl"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (None, "line 2 has no actions, and the student takes 3 numbers for each frame"),
        (acts(4), r"line 2 has actions \[4, 3\], and the student takes \[5, 3\]"),
        ([[1.0, 0.0]] * 5, r"line 2 has actions \[5, 2\], and the student takes \[5, 3\]"),
        ([[1.0, 0.0, math.inf]] * 5, "line 2: actions of frame 0 are not finite"),
        ([1.0, 2.0], r"line 2: actions have the shape \[frames, k\], not \[2\]"),
        ([[1.0], [1.0, 2.0]], "line 2: actions are a list of numbers for each frame"),
        ("absent.npy", "absent.npy"),
        ("prompts.jsonl", "names no file of actions: have .npy, .safetensors"),
    ],
)
def test_rows_of_other_actions_are_refused(model, tmp_path, cell, said):
    prompts = rows(tmp_path, acts(5), cell)
    words = words_of("dmd2", model, prompts=prompts) + flags(OF_EACH["dmd2"])
    with pytest.raises(UserError, match=said):
        check(parse(words), ALONE)


def test_files_of_no_actions_are_refused(tmp_path):
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object))
    (tmp_path / "broken.safetensors").write_bytes(b"x")
    save_file({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, tmp_path / "two.safetensors")
    for name, said in (
        ("pickled.npy", "cannot be read"),
        ("broken.safetensors", "cannot be read"),
        ("two.safetensors", "holds a, b: name one of them actions"),
    ):
        with pytest.raises(UserError, match=said):
            read_prompts(rows(tmp_path, name))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "has actions, and the student takes none"),
        ({"student__action-size": 2}, r"roles take actions of different sizes \(student 2, teacher 0"),
        ({"student__action-size": 2, "student__flow-map": True}, "neither flow maps nor sparse attention take actions"),
    ],
)
def test_actions_of_a_student_without_any_are_refused(tmp_path, more, said):
    plain = small_pipeline(tmp_path / "model")
    words = words_of("dmd2", plain, prompts=rows(tmp_path, acts(5)), **more) + flags(OF_EACH["dmd2"])
    with pytest.raises(UserError, match=said):
        check(parse(words), ALONE)


def test_data_without_actions_is_refused(model, tmp_path):
    small = SINGLE | {"video.frames": 5, "video.height": 32, "video.width": 32, "video.fps": 8}

    def refused(said: str, **more: object) -> None:
        with pytest.raises(UserError, match=said):
            check(parse(words_of("finetune", model, **more) + flags(small)), ALONE)

    refused("the caption of .*0.mp4 has no actions", data__path=clips_of(tmp_path / "none"))
    wrong = clips_of(tmp_path / "wrong", lambda number: acts(5 + number))
    refused(r"the caption of .*1.mp4 has actions \[6, 3\]", data__path=wrong)
    refused("takes actions of size 3", data__path=wrong, **{"student__action-size": 4})
    small = {}
    refused("--data.path tiny has no actions", data__path="tiny")
