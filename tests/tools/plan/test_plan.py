"""The command plan: what it counts and computes is what a real training step does, and it says what does not fit."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ALONE, OF_CLIPS, OF_SAMPLES, REPO, checkpoint_of

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.plan.plan import check
from unified_trainer.run.registry import METHODS
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan import memory
from unified_trainer.tools.plan.cost import CORES
from unified_trainer.tools.plan.estimate import estimate
from unified_trainer.tools.plan.hardware import read_hardware
from unified_trainer.tools.plan.passes import PassBytes

sys.path.insert(0, str(REPO / "scripts"))
import bench_plan

VIDEO = ["--video.frames", "5", "--video.height", "32", "--video.width", "32"]
SMALL = ["--recipe", "tiny", "--validate-every", "0", *VIDEO]
SINGLE = ["--algorithm.batch-size", "2", "--algorithm.micro-batch", "1"]
GROUPS = ["--algorithm.num-prompts", "2", "--algorithm.num-samples", "2", "--algorithm.prompts-per-update", "1"]
GROUPS += ["--algorithm.rollout-batch", "2", "--algorithm.update-batch", "1", "--sampler.num-steps", "3"]
CLIPS = ["--video.frames", "17", "--video.height", "64", "--video.width", "64", "--data.num-clips", "4"]
OWN = {name: [*SINGLE, *CLIPS] for name in OF_CLIPS}
OWN |= dict.fromkeys(OF_SAMPLES, GROUPS)
OWN["dance_ppo"] = [*GROUPS, "--algorithm.num-prompts", "4", "--algorithm.prompts-per-update", "2"]
OWN["ode_init"] = [*SINGLE, "--algorithm.teacher-steps", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_calls_and_flops_are_those_of_a_real_step(method):
    """Step 5 of the tiny world: student and critic are both updated in it."""
    flags = ["--method", method, *SMALL, *OWN.get(method, SINGLE)]
    real = bench_plan.measure(flags, 5, memory=False)
    computed, passes = bench_plan.predicted(flags, 5)
    assert passes == real.passes
    assert computed.tokens == real.tokens
    assert computed.model_flops == pytest.approx(real.flops, rel=1e-9)


@pytest.mark.slow
def test_the_chunks_and_the_kv_cache_of_a_causal_teacher_are_counted():
    """Its cache holds cond and uncond; that of the student, which makes validations, one of them."""
    flags = ["--method", "ode_init", *SMALL, *OWN["ode_init"], "--sampler.chunks.chunk-frames", "1"]
    flags += ["--algorithm.causal-teacher"]
    real = bench_plan.measure(flags, 0, memory=False)
    computed, passes = bench_plan.predicted(flags, 0)
    assert passes == real.passes
    assert computed.model_flops == pytest.approx(real.flops, rel=1e-9)
    phases = computed.memory.phases
    assert phases["rollout"]["KV cache"] == 2 * phases["update of student"]["KV cache"] > 0


@pytest.mark.slow
def test_the_sparse_attention_of_a_causal_student_is_counted():
    """Tiles of one token, of which exactly half are kept whatever a chunk sees."""
    flags = ["--method", "self_forcing", *SMALL, *SINGLE, "--sampler.chunks.chunk-frames", "1"]
    dense, _ = bench_plan.predicted(flags, 5)
    flags += ["--student.sparse-attention.share", "0.5", "--student.sparse-attention.tile", "1", "1", "1"]
    real = bench_plan.measure(flags, 5, memory=False)
    computed, passes = bench_plan.predicted(flags, 5)
    assert passes == real.passes and computed.model_flops != dense.model_flops
    assert computed.model_flops == pytest.approx(real.flops, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "whole"), [("wan2.1-1.3b", False), ("ltx-video", True)])
def test_a_reward_of_the_first_frame_decodes_all_unless_the_decoder_is_causal(recipe, whole):
    flags = ["--recipe", recipe, "--method", "dance_grpo", "--reward.frames", "first", "--validate-every", "0"]
    planned = estimate(parse(flags), 8)
    assert {frames for _, frames, _ in planned.counts.decoded} == {planned.sizes.latent[1] if whole else 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune, adapter", "dmd2"])
def test_memory_is_within_a_tenth_of_a_real_step(name, tmp_path):
    flags = bench_plan.flags_of(name, tmp_path)
    computed = bench_plan.bytes_of(bench_plan.predicted(flags)[0])
    assert bench_plan.measure(flags).bytes == pytest.approx(computed, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("crd", ["--algorithm.kl-coefficient", "0.1"]),
        ("awm", ["--student.adapter.rank", "2"]),
        ("dmd2", ["--student.ema-decay", "0"]),
    ],
)
def test_the_bytes_of_a_checkpoint(method, more, tmp_path):
    """Averages of the student are in it, and a reference is not."""
    flags = ["--method", method, *SMALL, *OWN.get(method, SINGLE), *more]
    assert main([*flags, "--steps", "1", "--output", str(tmp_path / "run")]) == 0
    held = checkpoint_of(tmp_path / "run", 1)
    real = sum(tensor.nbytes for tensor in held.values() if tensor.numel() > 1)
    assert real == pytest.approx(estimate(parse(flags), 1).checkpoint, rel=1e-3)


def test_hardware_is_read_by_number_and_name():
    machine = read_hardware("8xh200")
    assert (machine.count, machine.name, machine.memory) == (8, "H200", 141e9) and machine.flops == 989e12
    assert read_hardware("L4").count == 1
    with pytest.raises(UserError, match="such as 8xH200; have H200"):
        read_hardware("8xH900")


@pytest.mark.slow
def test_a_run_that_does_not_fit_names_settings_that_help(capsys, monkeypatch):
    """All weights of 1.3B with moments, gradients and EMA are 25 GiB: too much for 24 GB, whatever the activations.

    Activations of each latent frame are made up here; they are traced in the test above.
    """
    monkeypatch.setattr(memory, "pass_bytes", lambda _network, latent, *_, **_named: PassBytes(*[4e8 * latent[1]] * 4))
    monkeypatch.setattr(memory, "decode_bytes", lambda *_, **_named: 4e9)
    words = ["plan", "--method", "finetune", "--recipe", "wan2.1-1.3b", "--hardware", "L4", "--json"]
    assert main(words) == 5
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] == {} and not found["estimated"]["fits"]
    assert found["computed"]["parameters"]["student"] == 1_418_996_800
    assert found["computed"]["memory_bytes_of_a_rank"]["always"]["moments"] == 8 * 1_418_996_800
    better = found["estimated"]["better_settings"]
    assert len(better) == 3 and "--student.adapter.rank 16" in [one["flags"] for one in better]
    assert better == sorted(better, key=lambda one: one["peak_bytes"])


@pytest.mark.slow
def test_rollouts_and_scorers_are_counted_where_they_are(capsys, monkeypatch):
    """64 samples of a rank, 2 at a time, of 21 tensors of 16 x 14 x 30 x 52 numbers; HPSv3 only while it scores."""
    monkeypatch.setattr(memory, "pass_bytes", lambda *_, **_named: PassBytes(0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(memory, "decode_bytes", lambda *_, **_named: 0.0)
    found = []
    for settings in (["--reward.no-offload"], ["--algorithm.trajectories", "cpu"]):
        main(["plan", "--method", "dance_grpo", "--recipe", "wan2.1-1.3b", "--hardware", "8xH200", "--json", *settings])
        found.append(json.loads(capsys.readouterr().out)["computed"]["memory_bytes_of_a_rank"])
    sample = 21 * 4 * 16 * 14 * 30 * 52
    there, moved = ({name: one.get("rollouts", 0) for name, one in each["phases"].items()} for each in found)
    assert there["update of student"] == there["reward"] == 64 * sample and there["rollout"] == 66 * sample
    assert moved["update of student"] == moved["reward"] == 0 and moved["rollout"] == 2 * sample
    scorers = found[0]["always"]["scorers"]
    assert scorers > 0 and found[1]["always"]["scorers"] == 0
    of_phases = {name: one.get("scorers", 0) for name, one in found[1]["phases"].items()}
    assert of_phases["reward"] == of_phases["validation"] == scorers
    assert of_phases["update of student"] == of_phases["optimizer of student"] == of_phases["rollout"] == 0


@pytest.mark.slow
def test_a_copy_on_every_rank_sends_gradients_alone():
    """Shards of 8 ranks: blocks are gathered forward and backward, and each gradient is reduced once, by rings."""
    words = ["--method", "finetune", *SMALL, *CLIPS, "--algorithm.batch-size", "8", "--algorithm.micro-batch", "1"]
    words += ["--student.precision", "fp32"]
    sharded = estimate(parse(words), 8)
    copies = estimate(parse([*words, "--parallel.replicate", "0", "--parallel.shard", "1"]), 8)
    gradients = 4 * sharded.parameters["student"]
    assert sharded.inside == pytest.approx(7 / 8 * 3 * gradients, rel=1e-6) and sharded.across == 0
    assert copies.inside == 0 and copies.across == pytest.approx(2 * 7 / 8 * gradients, rel=1e-6)
    assert sharded.replicated(1) == (copies.sent, copies.memory.total(copies.memory.peak))


def test_a_model_of_unknown_size_is_refused(capsys):
    assert main(["plan", "--method", "finetune", "--recipe", "wan2.1-1.3b", "--student.path", "some/model"]) == 2
    assert "no sizes are known for it" in capsys.readouterr().err


@pytest.mark.slow
def test_plan_takes_the_whole_command_line_of_a_run(tmp_path, capsys):
    words = ["--method", "dmd2", "--hardware", "H100", *SMALL, *SINGLE]
    assert main(["plan", *words, "--json"]) == 0
    expected = capsys.readouterr().out
    course = [
        "--output",
        str(tmp_path / "run"),
        "--checkpoint-every",
        "3",
        "--no-async-save",
        "--tracking.wandb",
        "off",
    ]
    assert main(["plan", *course, "--json", *words]) == 0
    assert capsys.readouterr().out == expected and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "dmd2", "--data.path", "clips"], "would not read it"),
        (["--method", "finetune", "--prompts", "a.txt"], "takes their captions"),
        (["--method", "dmd2", "--checkpoint-evry", "3"], "did you mean --checkpoint-every?"),
    ],
)
def test_plan_refuses_flags_that_a_run_would_not_read(capsys, words, said):
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


ROLLING = "--sampler.chunks.chunk-frames 1 --sampler.chunks.window-frames 2 --sampler.chunks.sink-frames 1 "
ROLLING += "--sampler.chunks.rolling-sink"
REFUSED = {  # flags that a start of dance_grpo refuses, with words of the message
    "--student.lr-schedule cosine --student.lr-decay-updates 0": "student.lr_schedule cosine needs student.lr_decay",
    "--keep-best 2 --validate-every 0": "keep_best 2 needs validations to compare",
    "--hacking-monitor.action roll_back": "hacking_monitor.action roll_back needs validations to compare",
    "--rollouts.ahead 1": "rollouts.ahead needs rollouts.workers above 0",
    "--parallel.sequence 8": "parallel.sequence (8) must divide the 4 attention heads of student.path",
    "--parallel.attention sage": "parallel.attention sage rounds to 8 bits",
    "--algorithm.kernel ode": "algorithm.kernel must be stochastic, not ode",
    "--video.frames 8": "video.frames must be 4k + 1 for this VAE, not 8: set 5 or 9",
    "--video.height 40": "video.height must be a multiple of 16 for this VAE, not 40: set 32 or 48",
    f"--video.frames 17 {ROLLING}": "sampler.chunks.rolling_sink cannot be in one masked pass over all chunks",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dance_grpo", "distill_rl"])
def test_a_rank_may_have_one_sample_of_a_group(method):
    """The FLOPs are those of ranks with two samples, one at a time; a rank makes half of their passes."""
    words = ["--method", method, *SMALL, *GROUPS, "--algorithm.num-prompts", "4", "--algorithm.prompts-per-update", "2"]
    alone, pairs = estimate(parse(words), 4), estimate(parse([*words, "--algorithm.rollout-batch", "1"]), 2)
    assert (alone.table["samples per rank"], pairs.table["samples per rank"]) == (2, 4)  # of two updates
    assert alone.model_flops == pytest.approx(pairs.model_flops)
    assert alone.counts.calls()["student"]["samples"] == pairs.counts.calls()["student"]["samples"] / 2
    assert 2 * alone.counts.kept == pairs.counts.kept


@pytest.mark.parametrize("frames", [9, 17])
def test_a_rolling_sink_may_outgrow_the_window_in_methods_that_train_through_the_cache(frames):
    """In others a video that ends with the window may have one: its masked pass is what the cache does."""
    words = ["--recipe", "tiny", "--video.frames", str(frames), *ROLLING.split()]
    check(parse(["--method", "self_forcing", *words]), ALONE)
    if frames == 9:
        check(parse(["--method", "dance_grpo", *words]), ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED)
def test_plan_refuses_what_a_start_refuses(words):
    """With the same message: a plan that fits is one that starts."""
    run, said = parse(["--method", "dance_grpo", *SMALL, *words.split()]), []
    ranks = Mesh(torch.device("cpu"), 0, 8, run.parallel.degrees(8))
    for attempt in (lambda: check(run, ranks), lambda: estimate(run, 8)):
        with pytest.raises(UserError) as error:
            attempt()
        said.append(str(error.value))
    assert said[0] == said[1] and REFUSED[words] in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [42, 320])
def test_plan_takes_the_batch_and_the_validation_that_a_start_takes_on_any_number_of_ranks(ranks):
    """A batch of the recipe gives way to the ranks, and a rank may have no sample of a validation of 16."""
    words = ["--validate-every", "1", "--sampler.guidance-scale", "1", "--validation.num-samples", "16"]
    run = parse(["--method", "finetune", *SMALL, *CLIPS, *words])
    started = check(run, Mesh(torch.device("cpu"), 0, ranks, run.parallel.degrees(ranks)))
    planned = estimate(run, ranks)
    assert planned.counts.validation[0].samples == 1
    assert planned.run.algorithm == started.run.algorithm and planned.run.algorithm.batch_size == ranks
    assert planned.table["samples per rank"] == 1 and planned.notes[0] == started.notes[0]


@pytest.mark.slow
def test_auto_counts_compiled_blocks_on_cards_and_not_on_an_npu():
    """The elementwise traffic of a step is that of the setting which auto stands for."""
    words = ["--method", "finetune", *SMALL, *SINGLE, *CLIPS]

    def traffic(*more: str) -> float:
        return estimate(parse([*words, *more]), 1).work.traffic

    uncompiled, compiled = (traffic("--student.compile", value) for value in ("False", "True"))
    assert compiled < uncompiled
    assert traffic() == compiled and traffic("--device", "npu") == traffic("--device", "cpu") == uncompiled


@pytest.mark.slow
def test_epochs_of_prompts_are_counted_and_those_of_clips_are_asked_for(tmp_path):
    """100 prompts in steps of 64; a batch that grows takes more steps and as many samples."""
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(100)))
    words = ["--recipe", "wan2.1-1.3b", "--method", "dance_grpo", "--validate-every", "0", "--epochs", "16"]
    words += ["--prompts", str(tmp_path / "prompts.txt")]
    rising = ["--ramp-up.start", "64", "--ramp-up.increment", "64", "--ramp-up.samples", "3200"]
    whole, grown = estimate(parse(words), 8), estimate(parse([*words, *rising]), 8)
    card = read_hardware("8xH100")
    assert whole.run.steps == 25 < grown.run.steps
    assert grown.hours(card) == pytest.approx(whole.hours(card), rel=0.05)
    with pytest.raises(UserError, match="plan counts the rows of --prompts alone"):
        estimate(parse(["--recipe", "wan2.1-1.3b", "--method", "finetune", "--epochs", "2"]), 8)


POLICY = ["--method", "dance_grpo", *SMALL, "--algorithm.num-prompts", "4", "--algorithm.num-samples", "2"]
POLICY += ["--algorithm.prompts-per-update", "4", "--algorithm.rollout-batch", "2", "--validate-every", "0"]


@pytest.mark.slow
def test_workers_take_the_samples_off_the_training_processes():
    """Work is moved, and not lost: 2 ranks with one worker of a card take twice what a rank has sampled before."""
    card = read_hardware("2xH200")
    alone, apart, ahead, scored = (
        estimate(parse([*POLICY, *words]), 2)
        for words in (
            (),
            ("--rollouts.workers", "1"),
            ("--rollouts.workers", "1", "--rollouts.ahead", "1"),
            ("--rollouts.workers", "2", "--rollouts.reward-workers", "3", "--rollouts.reward-gpus", "0.5"),
        )
    )
    assert [one.cards for one in (alone, apart, ahead, scored)] == [2, 3, 3, 5.5]
    made, trained = (sum(work.seconds(card).values()) for work in (apart.sampled + apart.scored, apart.work))
    whole = sum(alone.work.seconds(card).values())
    assert made / 2 + trained == pytest.approx(whole) and 0 < trained < whole
    waits = {name: one.seconds(card)["waiting for workers"] for name, one in (("apart", apart), ("ahead", ahead))}
    assert alone.seconds(card)["waiting for workers"] == 0 and waits["apart"] == pytest.approx(made)
    busy = sum(ahead.seconds(card).values()) - waits["ahead"]
    assert waits["ahead"] == pytest.approx(max(0.0, made - busy))
    halves = (sum(work.seconds(card).values()) for work in (scored.sampled.times(2), scored.scored.times(3)))
    assert sum(halves) == pytest.approx(made)


@pytest.mark.slow
def test_a_price_and_copies_on_nodes(capsys):
    words = ["plan", *POLICY, "--algorithm.num-prompts", "16", "--algorithm.prompts-per-update", "16"]
    words += ["--hardware", "16xH200", "--parallel.replicate", "1", "--price", "2.5", "--rollouts.workers", "4"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["estimated"]
    assert (found["devices"], found["device_hours"]) == (20, pytest.approx(20 * found["hours"]))
    assert found["cost"] == pytest.approx(2.5 * found["device_hours"])
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "on 20 cards, of which workers have 4" in said and "at 2.5 for a card and hour" in said
    assert "with a copy on every node" in said and "--parallel.replicate 0 --parallel.shard 8" in said


@pytest.mark.slow
def test_ocr_on_cpu_cores_is_waited_for_where_sampling_does_not_hide_it():
    """A rank has 4 samples of 5 frames in two parts, of which it scores the first while it makes the second."""
    ocr = ["--reward.kind", "ocr", "--reward.path", "", "--reward.frames", "all", "--reward.processes"]
    planned, alone = (estimate(parse([*POLICY, *ocr, processes]), 2) for processes in "20")
    card, whole = read_hardware("2xH200"), 4 * 5 * 0.5 / 2
    assert planned.work.on_cores == pytest.approx(whole) and planned.parts == 2
    slow = replace(card, mfu=1e-12)
    assert planned.seconds(slow)[CORES] == pytest.approx(whole / 2)
    rest = sum(planned.seconds(card).values()) - planned.seconds(card)[CORES]
    assert whole / 2 < whole - rest / 2 <= planned.seconds(card)[CORES] < whole
    assert any(note.startswith("assumed: ocr takes 0.5 CPU s a frame") for note in planned.notes)
    assert not any("not counted" in note for note in planned.notes)
    assert alone.seconds(slow)[CORES] == alone.work.on_cores == pytest.approx(2 * whole)


@pytest.mark.slow
def test_each_bucket_is_counted_and_memory_is_that_of_the_largest(capsys, monkeypatch):
    """Tokens of a step are those of each shape; a run of the largest bucket alone needs as much memory."""
    monkeypatch.setattr(memory, "pass_bytes", lambda _network, latent, *_, **_named: PassBytes(*[4e8 * latent[1]] * 4))
    monkeypatch.setattr(memory, "decode_bytes", lambda *_, **_named: 4e9)
    words = ["plan", "--method", "finetune", "--recipe", "wan2.1-1.3b", "--hardware", "8xH200", "--json"]
    found = []
    for more in (["--data.buckets", "17x480x832", "49x480x832"], ["--video.frames", "49"]):
        assert main([*words, "--data.path", "videos", "--validate-every", "0", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    buckets, alone = found[0]["estimated"]["buckets"], found[1]
    assert found[0]["computed"]["totals"] == alone["computed"]["totals"]
    assert buckets["49x480x832"]["tokens"] / buckets["17x480x832"]["tokens"] == pytest.approx(13 / 5)
    assert buckets["49x480x832"]["model_flops"] == alone["computed"]["model_flops_of_a_step"]
    assert buckets["49x480x832"]["seconds"] == alone["estimated"]["seconds_of_a_step"]
    assert buckets["17x480x832"]["seconds"] < buckets["49x480x832"]["seconds"] and "buckets" not in alone["estimated"]
