"""The command sample: a run's own sampler, with the same videos as diffusers gives for the export."""

import dataclasses
import json
import re

import av
import pytest
import torch
from diffusers import WanPipeline
from helpers import ALONE, Calls, fill_disk, flags, run
from PIL import Image

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.tools.load_run import LoadedRole, load_role
from unified_trainer.tools.sample import sample as sample_module
from unified_trainer.tools.sample.sample import of_length, pieces, videos

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle moving left", "blue square moves up", "something else"]
MOVING = {"student.learning-rate": 1e-2, "student.warmup-updates": 0, "student.ema-decay": 0.5}
SAMPLERS = {
    "ode": {"sampler.num-steps": 3, "sampler.guidance-scale": 3.0, "sampler.negative-prompt": "a green triangle"},
    "sde": {"sampler.num-steps": 4, "sampler.guidance-scale": 1.0, "sampler.solver": "sde"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run for each sampler; the first one trains an adapter."""
    root = tmp_path_factory.mktemp("runs")
    run("finetune", root / "ode", *flags(MOVING | SAMPLERS["ode"] | {"student.adapter.rank": 2}))
    run("finetune", root / "sde", *flags(MOVING | SAMPLERS["sde"]))
    causal = {"sampler.chunks.chunk-frames": 1, "algorithm.forcing": "teacher"}
    run("finetune", root / "causal", *flags(MOVING | SAMPLERS["sde"] | causal))
    return root


def trained(folder, spec: str = "") -> LoadedRole:
    return load_role(f"{folder}{spec}", "student", None, ALONE, causal=True)


def sampled(one: LoadedRole, prompts: list[str], seed: int, batch: int) -> torch.Tensor:
    return torch.cat(list(videos(one, Request.of(prompts), seed, batch)))


# Equal videos.


def test_the_scheduler_alone_gives_the_same_video_for_the_same_seed(runs, tmp_path):
    """WanPipeline runs the export of the ode solver with the settings of its unified_trainer.json."""
    ours = sampled(trained(runs / "ode"), PROMPTS[:2], 5, 2)
    assert main(["export", str(runs / "ode"), str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / "unified_trainer.json").read_text())["sampler"]
    pipeline = WanPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        PROMPTS[:2],
        negative_prompt=about["negative_prompt"],
        num_frames=17,
        height=64,
        width=64,
        num_inference_steps=about["num_steps"],
        guidance_scale=about["guidance_scale"],
        generator=[torch.Generator().manual_seed(5 + i) for i in range(2)],
        max_sequence_length=16,
        output_type="pt",
    ).frames
    torch.testing.assert_close(ours, theirs.movedim(1, 2), rtol=0, atol=2e-5)
    assert float(ours.std()) > 0.01


def test_a_video_does_not_depend_on_the_batch(runs):
    one = trained(runs / "sde")
    together, apart = sampled(one, PROMPTS, 3, 3), sampled(one, PROMPTS, 3, 1)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    torch.testing.assert_close(sampled(one, PROMPTS[1:], 4, 2), together[1:], rtol=0, atol=1e-5)
    assert not torch.allclose(sampled(one, PROMPTS, 4, 3), together, atol=1e-2)


def test_ema_weights_give_other_videos(runs):
    live, ema = (sampled(trained(runs / "ode", spec), PROMPTS[:1], 0, 1) for spec in ("", ":ema"))
    assert not torch.allclose(live, ema, atol=1e-4)


def test_a_causal_student_samples_chunk_by_chunk(runs):
    """Both ways of loading give the same bidirectional velocity; the causal student samples a whole video."""
    causal = trained(runs / "causal")
    assert type(causal.role).__name__ == "CausalStudent"
    plain = load_role(str(runs / "causal"), "student", None, ALONE, causal=False)
    with causal.role.running() as model:
        x_t, sigma, cond = model.example()
    with torch.no_grad():
        torch.testing.assert_close(
            causal.role.velocity(x_t, sigma, cond), plain.role.velocity(x_t, sigma, cond), rtol=0, atol=1e-5
        )
    video = sampled(causal, PROMPTS[:2], 0, 2)
    assert video.shape == (2, 3, 17, 64, 64) and float(video.std()) > 0.01


def test_a_causal_export_says_that_diffusers_has_no_scheduler_for_it(runs, tmp_path, capsys):
    assert main(["export", str(runs / "causal"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Its pipeline.py makes the videos of `sample`: README.md shows how" in said
    assert "diffusers has no scheduler for its sampler" in said
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["scheduler"][1] == "UniPCMultistepScheduler"


# Chunk by chunk.


def test_a_stream_is_the_whole_video(runs):
    """The stream has the same frames: the first alone, then four for each chunk, as the VAE decodes them."""
    one = trained(runs / "causal")
    (stream,) = pieces(one, Request.of(PROMPTS[:2]), 0, 2, by_chunk=True)
    parts = list(stream)
    assert [part.shape[2] for part in parts] == [1, 4, 4, 4, 4]
    assert torch.equal(torch.cat(parts, 2), sampled(one, PROMPTS[:2], 0, 2))


def test_a_prompt_that_switches(runs):
    """Before the switch the video equals that of the first prompt bit for bit; after it, it differs from both."""
    one = trained(runs / "causal")
    first, second, both = (
        torch.cat(list(next(pieces(one, Request.of([text]), 0, 1, by_chunk=True))), 2)
        for text in (PROMPTS[0], PROMPTS[1], f"{PROMPTS[0]} | {PROMPTS[1]}")
    )
    assert torch.equal(both[:, :, :9], first[:, :, :9])  # three of five chunks
    for other in (first, second):
        assert not torch.allclose(both[:, :, 9:], other[:, :, 9:], atol=1e-3)
    unswitched = torch.cat(
        list(next(pieces(one, Request.of([f"{PROMPTS[0]} | {PROMPTS[0]}"]), 0, 1, by_chunk=True))), 2
    )
    assert torch.equal(unswitched, first)


def test_a_recached_switch(runs):
    """Before the switch frames are equal bit for bit; after it they differ. Without a switch nothing changes."""
    one, texts = trained(runs / "causal"), [f"{PROMPTS[0]} | {PROMPTS[1]}"]
    streams = [pieces(one, Request.of(texts), 0, 1, by_chunk=True, recache=recache) for recache in (False, True)]
    kept, recached = (torch.cat(list(next(stream)), 2) for stream in streams)
    assert torch.equal(kept[:, :, :9], recached[:, :, :9])  # three of five chunks
    assert not torch.allclose(kept[:, :, 9:], recached[:, :, 9:], atol=1e-3)
    unswitched = pieces(one, Request.of(PROMPTS[:1]), 0, 1, by_chunk=True, recache=True)
    assert torch.equal(torch.cat(list(next(unswitched)), 2), sampled(one, PROMPTS[:1], 0, 1))


def test_a_stream_is_sampled_chunk_by_chunk(runs):
    """The first chunk takes four calls, each further one four and the context pass of the chunk before."""
    one = trained(runs / "causal")
    calls = Calls.of(one.role)
    (stream,) = pieces(one, Request.of(PROMPTS[:1]), 0, 1, by_chunk=True)
    seen = [len(calls.x_t) for _ in stream]
    assert seen == [4, 9, 14, 19, 24] and len(calls.x_t) == 24


def test_longer_than_in_training(runs):
    """A longer video attends to as many frames as in training, so each chunk costs the same."""
    one = of_length(trained(runs / "causal"), 33, None, None, 1)
    assert one.run.sampler.chunks.window_frames == 4 and one.run.sampler.chunks.sink_frames == 0
    video = sampled(one, PROMPTS[:1], 0, 1)
    assert video.shape[2] == 33 and float(video[:, :, 17:].std()) > 0.01
    chosen = of_length(trained(runs / "causal"), 33, 3, 1, 1).run.sampler.chunks
    assert (chosen.window_frames, chosen.sink_frames, chosen.rolling_sink) == (3, 1, False)
    rolling = of_length(trained(runs / "causal"), 33, 3, 1, 1, rolling=True)
    assert rolling.run.sampler.chunks == dataclasses.replace(chosen, rolling_sink=True)
    without = of_length(rolling, 33, 4, 0, 1).run.sampler.chunks  # without a sink, the run's setting has no meaning
    assert (without.sink_frames, without.rolling_sink) == (0, False)
    assert of_length(trained(runs / "causal"), 17, None, None, 1).run.sampler.chunks.window_frames == 0
    assert sampled(of_length(trained(runs / "sde"), 9, None, None, 1), PROMPTS[:1], 0, 1).shape[2] == 9


# Files.


def test_a_stream_in_files(runs, tmp_path, capsys):
    words = ["--prompts", *PROMPTS, "--output", str(tmp_path / "out"), "--batch", "2", "--stream", "--frames", "21"]
    assert main(["sample", str(runs / "causal"), *words]) == 0, capsys.readouterr().err
    assert re.search(r"; first frames after \d+\.\d\d s, \d+\.\d frames/s over all videos", capsys.readouterr().out)
    for i in range(3):
        with av.open(str(tmp_path / "out" / f"{i}.mp4")) as video:
            assert len(list(video.decode(video=0))) == 21


def test_videos_and_their_table(runs, tmp_path, capsys):
    (tmp_path / "more.txt").write_text("\n".join(PROMPTS[1:]) + "\n")
    words = ["--prompts", PROMPTS[0], str(tmp_path / "more.txt"), "--seed", "7", "--output", str(tmp_path / "out")]
    assert main(["sample", f"{runs / 'ode'}@1:ema", *words, "--batch", "2"]) == 0
    assert f"student (EMA) from {runs / 'ode' / 'checkpoints' / 'step_1'}" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert [(row["prompt"], row["seed"]) for row in rows] == list(zip(PROMPTS, (7, 8, 9), strict=True))
    for row in rows:
        with av.open(str(tmp_path / "out" / row["video"])) as video:
            frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert len(frames) == 17 and frames[0].shape == (64, 64, 3)
    with Image.open(tmp_path / "out" / "contact_sheet.png") as sheet:
        assert sheet.height == 3 * (128 + 2 * 16)


def test_videos_by_the_names_that_vbench_reads(runs, tmp_path, monkeypatch):
    """VBench takes each file of a folder for a video; the contact sheet has the first videos alone."""
    monkeypatch.setattr(sample_module, "SHOWN", 3)
    words = ["--prompts", *PROMPTS[:2], "--num-samples", "2", "--prompt-names", "--batch", "3"]
    assert main(["sample", str(runs / "ode"), *words, "--seed", "7", "--output", str(tmp_path / "out")]) == 0
    names = {f"{prompt}-{index}.mp4" for prompt in PROMPTS[:2] for index in range(2)}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"videos", "contact_sheet.png", "samples.json"}
    assert {file.name for file in (tmp_path / "out" / "videos").iterdir()} == names
    rows = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert [(row["video"], row["seed"]) for row in rows] == [
        (f"videos/{prompt}-{index}.mp4", 7 + 2 * number + index)
        for number, prompt in enumerate(PROMPTS[:2])
        for index in range(2)
    ]
    with Image.open(tmp_path / "out" / "contact_sheet.png") as sheet:
        assert sheet.height == 3 * (128 + 2 * 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--prompt-names", "--prompts", "a", "b", "a"], "the prompt 'a' comes twice"),
        (["RUN", "--prompt-names", "--prompts", "a" * 250], "cannot name a file"),
        (["RUN@9", "--prompts", "a"], "has no checkpoint of step 9; it has 1"),
        (["RUN", "--prompts", "EMPTY"], "empty.txt is empty"),
        (["RUN", "--prompts", "a", "--batch", "0"], "--batch must be from 1 to 1000000, not 0"),
        (["RUN", "--prompts", "a", "--output", "RUN"], "exists and is not an empty folder"),
        (["RUN", "--prompts"], "--prompts needs at least one"),
        (["RUN", "--prompts", "a", "--stream"], "--stream needs a causal student"),
        (["CAUSAL", "--prompts", "a", "--recache"], "--recache is for prompts that switch in one video"),
        (["RUN", "--prompts", "a", "--sink-frames", "1"], "--sink-frames and --rolling-sink are for causal students"),
        (["RUN", "--prompts", "a", "--rolling-sink"], "--sink-frames and --rolling-sink are for causal students"),
        (["RUN", "--prompts", "a", "--frames", "16"], "video.frames must be 4k + 1"),
        (["CAUSAL", "--prompts", "a", "--frames", "257"], "a video of 257 x 64 x 64 has 65 tokens along one axis"),
        (["CAUSAL", "--prompts", "a", "--window-frames", "1", "--sink-frames", "1"], "must hold the sink and a chunk"),
    ],
)
def test_bad_input_is_one_message(runs, tmp_path, capsys, words, message):
    (tmp_path / "empty.txt").touch()
    places = {
        "RUN": str(runs / "ode"),
        "CAUSAL": str(runs / "causal"),
        "RUN@9": f"{runs / 'ode'}@9",
        "EMPTY": str(tmp_path / "empty.txt"),
    }
    words = [places.get(word, word) for word in words]
    assert main(["sample", "--output", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["1.mp4", "contact_sheet.png", "samples.json"])
def test_a_full_disk_is_one_error(runs, tmp_path, monkeypatch, capsys, name):
    fill_disk(monkeypatch, name)
    words = ["sample", str(runs / "sde"), "--prompts", *PROMPTS[:2], "--output", str(tmp_path / "videos")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: no space to write {tmp_path / 'videos'} (") and "Traceback" not in said
