"""scripts/simulate_pipeline.py: the simulated pipeline keeps its rule and agrees with closed forms; costs are exact."""

import dataclasses
import json
import sys
from collections import Counter

import pytest
import torch
import yaml
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from helpers import ALONE, CPU, REPO, shell
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.errors import UserError
from unified_trainer.meter import Meter
from unified_trainer.models.wan.codec import WanCondition
from unified_trainer.models.wan.model import WanModel
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig

sys.path.insert(0, str(REPO / "scripts"))
import simulate_pipeline
import wan_costs
from pipeline import Load, Placement, simulate, work_items
from simulate_pipeline import Computed, Costs, Run, Seconds, Split, Study, best, comparison, splits
from wan_costs import Gpu, Network, Video

pytestmark = pytest.mark.slow

# Powers of two and their sums: the simulated times are exact.
LOAD = Load(samples=16, item=2, rollout=4.0, reward=1.0, train=2.0, fixed=3.0, publish=0.5, fetch=0.25)
TRAINER = 3.0 + 0.5 + 16 * 2.0  # of one rank
MADE = 0.25 + 16 * (4.0 + 1.0)  # by one worker that scores its own items


def seconds(placement: Placement, load: Load = LOAD, steps: int = 12) -> float:
    return simulate(load, placement, steps).step_seconds


# The pipeline, in closed form.


def test_without_workers_everything_runs_one_after_the_other():
    """Nothing is published; two ranks share the samples and not what is fixed."""
    for ranks in (1, 2):
        timeline = simulate(LOAD, Placement(ranks), 3)
        assert timeline.step_seconds == 3.0 + 16 * (4.0 + 1.0 + 2.0) / ranks
        assert timeline.utilisation == {"training": 1.0}


def test_one_worker_and_no_step_ahead_is_the_sum():
    timeline = simulate(LOAD, Placement(1, workers=1), 4)
    assert timeline.step_seconds == TRAINER + MADE
    assert timeline.utilisation == {"training": TRAINER / (TRAINER + MADE), "rollout": MADE / (TRAINER + MADE)}


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_workers_share_the_items_of_a_step(workers):
    """Eight items: three workers make three rounds."""
    rounds = -(-8 // workers)
    assert seconds(Placement(1, workers)) == TRAINER + 0.25 + rounds * 10.0


def test_a_worker_copies_a_version_once():
    """Two workers, each with its own copy at its first item: both items of a round take as long."""
    slow = dataclasses.replace(LOAD, fetch=64.0)
    assert seconds(Placement(1, 2), slow) == TRAINER + 64.0 + 4 * 10.0


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("train", [1.0, 4.0, 5.0, 8.0])
def test_ahead_of_training_the_slower_pool_sets_the_time(ahead, train):
    """Step k + 1 is asked for before step k is trained: max(fixed + publish + train, fetch + rollout).

    Another step ahead brings nothing. Times of the trainer lie below, near and above those of the worker, 80.25 s.
    """
    load = dataclasses.replace(LOAD, train=train)
    assert seconds(Placement(1, 1, ahead=ahead), load) == max(3.5 + 16 * train, MADE)


def test_ahead_of_training_no_worker_waits_for_the_last_item_of_a_step():
    """Eight items of 10 s over three workers: 80 / 3 s a step, not three rounds of 10 s."""
    load = dataclasses.replace(LOAD, train=0.5, fetch=0.0)
    assert seconds(Placement(1, 3, ahead=1), load, steps=62) == pytest.approx(80 / 3, rel=0.01)


def test_reward_workers_score_while_the_next_item_is_made():
    """One of each: the last item is scored after all rollouts; where scoring is slower, the first is made before."""
    placed = Placement(1, workers=1, reward_workers=1)
    assert seconds(placed) == TRAINER + 0.25 + 8 * 8.0 + 2.0
    slow = dataclasses.replace(LOAD, reward=8.0)
    assert seconds(placed, slow) == TRAINER + 0.25 + 8.0 + 8 * 16.0
    assert seconds(Placement(1, 1, 1, ahead=1), slow) == 8 * 16.0
    assert seconds(Placement(1, 1, 2, ahead=1), slow) == 0.25 + 8 * 8.0


def test_items_are_cut_from_the_share_of_each_rank():
    """Ten samples over two ranks, in items of at most two: no item holds samples of two ranks."""
    assert work_items(dataclasses.replace(LOAD, samples=10), 2) == [2, 2, 1, 2, 2, 1]


def test_items_of_earlier_steps_are_made_first():
    """With three steps ahead and one worker, the worker goes through the steps in order."""
    items = simulate(LOAD, Placement(1, 1, ahead=3), 20).items
    assert [item.step for item in items] == sorted(item.step for item in items)


# The pipeline, for any numbers.

LOADS = st.builds(
    Load,
    samples=st.sampled_from([8, 16, 24]),
    item=st.sampled_from([1, 2, 4]),
    rollout=st.sampled_from([0.0, 0.5, 1.0, 7.0]),
    reward=st.sampled_from([0.0, 0.25, 3.0]),
    train=st.sampled_from([0.5, 2.0, 9.0]),
    fixed=st.sampled_from([0.0, 1.0]),
    publish=st.sampled_from([0.0, 2.0]),
    fetch=st.sampled_from([0.0, 4.0]),
)
PLACED = st.builds(Placement, st.sampled_from([1, 2]), st.integers(1, 9), st.integers(0, 4), ahead=st.integers(0, 3))


@given(LOADS, PLACED, st.sampled_from([0.0, 0.5]))
def test_every_item_is_made_once_with_the_weights_of_its_version(load, placed, jitter):
    steps = 12
    items = simulate(load, placed, steps, jitter).items
    sizes = work_items(load, placed.ranks)
    assert Counter((item.step, item.number) for item in items) == {
        (step, number): 1 for step in range(steps) for number in range(len(sizes))
    }
    assert all(item.samples == sizes[item.number] for item in items)
    assert all(item.version == max(0, item.step - placed.ahead) for item in items)


@given(LOADS, PLACED, st.sampled_from([0.0, 0.5]))
def test_no_item_is_begun_before_it_is_asked_for(load, placed, jitter):
    """The trainer asks with version v after it has trained v steps and published the weights."""
    timeline = simulate(load, placed, 12, jitter)
    asked = [end + load.fixed + load.publish for end in (0.0, *timeline.ends)]
    assert all(item.begin >= asked[item.version] for item in timeline.items)


@given(LOADS, PLACED)
def test_a_run_takes_no_less_than_its_slowest_pool_and_no_more_than_all_one_after_the_other(load, placed):
    """Every pool has to do its work; and no worker idles while an item of the step that training waits for is there."""
    steps = 12
    end = simulate(load, placed, steps).ends[-1]
    trainer = load.fixed + load.publish + load.samples * load.train / placed.ranks
    apart = placed.reward_workers > 0
    of_sample = load.rollout + (0.0 if apart else load.reward)
    least = [trainer, load.samples * of_sample / placed.workers]
    least += [load.samples * load.reward / placed.reward_workers] if apart else []
    count = len(work_items(load, placed.ranks))
    rounds = load.item * of_sample * -(-count // placed.workers)
    scored = load.item * load.reward * -(-count // placed.reward_workers) if apart else 0.0
    assert steps * max(least) - 1e-9 <= end <= steps * (trainer + load.fetch + rounds + scored) + 1e-9


@given(LOADS, PLACED, st.integers(0, 3))
def test_a_seed_gives_one_run(load, placed, seed):
    one, two = (simulate(load, placed, 12, 0.3, seed) for _ in range(2))
    assert one == two and [item.begin for item in one.items] == [item.begin for item in two.items]
    assert load.rollout == 0 or one.ends != simulate(load, placed, 12, 0.3, seed + 1).ends


def test_jitter_belongs_to_the_item_whoever_makes_it():
    """The work of all items is the same for one worker and for four, but for the copies of the weights."""
    load = dataclasses.replace(LOAD, fetch=0.0)
    one, four = (simulate(load, Placement(1, workers), 8, 0.5).busy["rollout"] for workers in (1, 4))
    assert one == pytest.approx(four) and one != pytest.approx(8 * 80.0)


@pytest.mark.parametrize(
    "placed", [Placement(0), Placement(1, -1), Placement(1, 0, 1), Placement(1, 0, 0, 1), Placement(3)]
)
def test_placements_that_cannot_be_are_refused(placed):
    with pytest.raises(UserError):
        simulate(LOAD, placed, 8)


def test_too_few_steps_are_refused():
    with pytest.raises(UserError, match="4 steps with ahead 1"):
        simulate(LOAD, Placement(1, 1, ahead=1), 4)


# The best split.

UNIT = Load(samples=64, item=1, rollout=8.0, reward=8.0, train=16.0)
COARSE = Load(samples=64, item=16, rollout=24.0, reward=4.0, train=8.0)  # items that do not divide over the workers


def study(limit: float = 1.0, unit: Load = UNIT) -> Study:
    """Eight prompts of eight samples; a rollout worker that scores holds most."""

    def load(ranks: int, prompts: int) -> Load:
        return dataclasses.replace(unit, samples=8 * prompts)

    return Study("unit", 8, 8, load, lambda placed, prompts: (0.1, 0.2 if placed.reward_workers else 0.9), limit)


@pytest.mark.parametrize("gpus", [4, 12])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("unit", [UNIT, COARSE], ids=["fine", "coarse"])
def test_the_best_split_is_the_best_of_all(gpus, ahead, unit):
    """The bound by which splits are left out never leaves out the best one."""

    def rate(split: Split) -> float:
        return split.load.samples / split.run().step_seconds

    found, every = best(study(unit=unit), gpus, ahead), [*splits(study(unit=unit), gpus, ahead)]
    assert rate(found) == max(map(rate, every))
    assert sum(found.placement.pools.values()) == gpus and found.placement.ahead == ahead
    assert all(rate(split) <= 1.05 * split.rate_at_most for split in every)  # the window cuts items at both ends


def test_as_many_gpus_train_as_make_samples_where_both_take_as_long():
    found = best(study(), 8, 1)
    assert found.placement.ranks == 4 and found.run().step_seconds == 64 * 16.0 / 4


def test_prompts_follow_the_ranks():
    """Five ranks divide 10 x 8 samples, which is within a quarter of 8 x 8; 7 ranks 7 x 8; 11 would need 11 x 8."""
    prompts = {split.placement.ranks: split.prompts for split in splits(study(), 12, 1)}
    assert prompts == {1: 8, 2: 8, 3: 9, 4: 8, 5: 10, 6: 9, 7: 7, 8: 8, 9: 9, 10: 10}


def test_a_split_that_does_not_fit_is_left_out():
    assert best(study(limit=0.5), 8, 1).placement.reward_workers
    assert best(study(limit=0.05), 8, 1) is None
    assert simulate_pipeline.none_fits(study(limit=0.05), 8, 1) == ["none fits: needs 0 GB"]


# Computed costs.


def network(rank: int = 0) -> tuple[Network, Trainable]:
    """Wan's transformer with 64 channels, two layers and text of the real size, and the costs of one like it."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2, "ffn_dim": 96}
    model = WanModel(WanTransformer3DModel(**sizes, rope_max_seq_len=16))
    adapters = {"student": AdapterConfig(rank=rank)} if rank else {}
    backbone = Backbone(model, ALONE, adapters=adapters, trained=not rank)
    return Network(64, 2, 96, rank), Trainable("student", backbone, TrainableConfig())


@pytest.mark.parametrize("rank", [0, 3])
def test_flops_and_weights_are_those_of_the_network(rank):
    """The meter of a training step counts as many FLOPs, forward and backward, with adapters and without."""
    costs, role = network(rank)
    cond = WanCondition(torch.zeros(1, wan_costs.TEXT_TOKENS, 4096))
    x_t, sigma = torch.zeros(1, 16, 3, 4, 6), torch.full((1,), 0.5)
    meters = [Meter(CPU), Meter(CPU)]
    with meters[0].measure(), torch.no_grad():
        role.velocity(x_t, sigma, cond)
    with meters[1].measure():
        role.velocity(x_t, sigma, cond).square().mean().backward()
    assert meters[0].tokens == 18 and meters[0].flops == costs.forward(18)
    assert meters[1].flops == costs.forward(18) + costs.backward(18)
    assert role.parameters == costs.parameters
    assert sum(weight.numel() for weight in role.weights.values()) == costs.trained


def test_the_published_models_have_their_numbers_of_weights():
    assert Network(1536, 30, 8960).parameters == 1_418_996_800
    assert Network(5120, 40, 13824).parameters == 14_288_491_584


@pytest.mark.slow
@pytest.mark.parametrize("frames", [1, 9])
def test_decoding_costs_what_torch_counts(frames):
    with torch.device("meta"):
        vae = AutoencoderKLWan()
    video, counter = Video(frames, 480, 832), FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        vae.decode(torch.empty(1, 16, video.latent_frames, 60, 104, device="meta"))
    assert video.decode_flops == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_costs_follow_from_the_recipe():
    """20 steps with guidance are 40 passes; 11 of 19 transitions are trained, with recomputed activations."""
    large, small = (Computed.of(name, None, Gpu(), Seconds()) for name in ("wan2.1-14b", "wan2.1-1.3b"))
    assert small.work.video.tokens == 32760 and small.work.network == Network(1536, 30, 8960)
    assert large.work.network == Network(5120, 40, 13824, rank=64)
    load, flops = small.load(8, 64), 0.4 * 989e12
    forward, backward = (count(32760) for count in (small.work.network.forward, small.work.network.backward))
    assert load.samples == 512 and load.item == 1
    assert load.rollout == pytest.approx(40 * forward / flops)
    assert load.train == pytest.approx(22 * (2 * forward + backward) / flops)
    assert load.publish == load.fetch == 4 * 1_418_996_800 / 2e9
    assert large.load(8, 64).publish < load.publish
    own = Computed.of("wan2.1-1.3b", (53, 240, 416), Gpu(), Seconds(reward=1.0))
    assert own.work.video.tokens == 5460 and own.load(8, 64).reward == 1.0


def test_memory_of_14b():
    """A rollout worker fits 80 GB in bf16 with the scorer, in fp32 without; a single training rank fits no GPU."""
    work = Computed.of("wan2.1-14b", None, Gpu(), Seconds()).work
    assert work.worker_memory(scores=True) < 80e9 < work.worker_memory(scores=True, weight_bytes=4)
    assert work.worker_memory(scores=False, weight_bytes=4) < 80e9
    ranks = [work.rank_memory(n, 64, colocated=True) for n in (1, 8, 64)]
    assert ranks == sorted(ranks, reverse=True) and ranks[0] > 141e9 > ranks[1] > 80e9 > ranks[2]


@pytest.mark.parametrize("recipe", ["tiny", "wan2.2-a14b"])
def test_models_without_known_costs_are_refused(recipe):
    with pytest.raises(UserError, match=r"Wan2\.1 alone"):
        Computed.of(recipe, None, Gpu(), Seconds())


# Measured costs.

ALGORITHM = {"num_prompts": 8, "num_samples": 4, "prompts_per_update": 4, "rollout_batch": 8, "update_batch": 4}
PHASES = {"rollout": 8.0, "decode": 2.0, "score": 2.0, "update": 4.0, "optimizer": 0.5, "data": 0.25, "other": 0.25}


def write_run(folder, ranks: int = 1, scale: float = 1.0, rollouts: dict | None = None, **changes):
    """Write a run directory of three steps, the first of which is slow."""
    folder.mkdir()
    algorithm = ALGORITHM | {"timestep_fraction": 0.5} | changes
    settings = {"method": "dance_grpo", "sampler": {"num_steps": 4}, "video": {"frames": 5}, "algorithm": algorithm}
    settings |= {"rollouts": rollouts} if rollouts else {}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "environment.jsonl").write_text(json.dumps({"ranks": ranks}) + "\n")
    lines = [{"step": 0, "validation/reward": 1.0}]
    for step, factor in enumerate((9.0, scale, scale), 1):
        spent = {f"train/seconds/{name}": factor * value for name, value in PHASES.items()}
        lines.append({"step": step, "train/seconds": factor * sum(PHASES.values()), **spent})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_costs_of_a_run_by_sample_and_by_update(tmp_path):
    """Thirty-two samples over two ranks in two updates, without the first step."""
    costs = Costs.of(write_run(tmp_path / "run", ranks=2), Seconds(publish=7.0))
    assert costs.source.seconds["seconds"] == sum(PHASES.values())
    load = costs.load(ALGORITHM | {"num_prompts": 24})
    assert load == Load(96, 8, rollout=0.5, reward=0.25, train=0.25, fixed=0.5 + 3 * 0.5, publish=7.0)
    assert costs.study.load(1, 8) == costs.load(ALGORITHM)


def test_a_run_predicts_itself_and_others(tmp_path):
    """A run with workers: the other settings of the engine are in its config.yaml."""
    costs = Costs.of(write_run(tmp_path / "run"), Seconds(publish=0.5))
    workers = {"workers": 2, "reward_workers": 1, "ahead": 1}
    paths = [tmp_path / "run", write_run(tmp_path / "two", scale=0.5, rollouts=workers)]
    rows = comparison(costs, paths, 0.0, 0)[1:]
    assert rows[0] == [str(paths[0]), "1 + 0 + 0", "0", "32", "17", "17", "1.000"]
    predicted = Split(Placement(1, 2, 1, 1), 8, costs.load(ALGORITHM)).run().step_seconds
    assert rows[1] == [str(paths[1]), "1 + 2 + 1", "1", "32", f"{predicted:.4g}", "8.5", f"{predicted / 8.5:.3f}"]


def test_runs_that_give_no_costs_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.yaml is missing"):
        Run.read(tmp_path)
    with pytest.raises(UserError, match="take a run without"):
        Costs.of(write_run(tmp_path / "workers", rollouts={"workers": 2}), Seconds())
    costs = Costs.of(write_run(tmp_path / "run"), Seconds())
    other = write_run(tmp_path / "other", timestep_fraction=1.0)
    with pytest.raises(UserError, match=r"differ in algorithm\.timestep_fraction"):
        comparison(costs, [other], 0.0, 0)
    finetune = write_run(tmp_path / "finetune")
    settings = yaml.safe_load((finetune / "config.yaml").read_text())
    (finetune / "config.yaml").write_text(yaml.safe_dump(settings | {"algorithm": {"batch_size": 4}}))
    with pytest.raises(UserError, match="whose samples workers cannot make"):
        Run.read(finetune)
    short = write_run(tmp_path / "short")
    lines = (short / "metrics.jsonl").read_text().splitlines()
    (short / "metrics.jsonl").write_text("\n".join(lines[:2]))
    with pytest.raises(UserError, match="fewer than two training steps"):
        Run.read(short)


# The command.


def test_the_tables_of_a_run(tmp_path, capsys):
    """32 samples of 8 + 4 + 4 s on two GPUs, and a second that no GPU shares."""
    simulate_pipeline.main(run=write_run(tmp_path / "run"), gpus=(2,))
    lines = capsys.readouterr().out.splitlines()
    assert "| rollout | 8 | 47% |" in lines
    assert any(line.startswith("| 2 GPUs | colocated | 2 + 0 + 0 | 8 | 9 | 100% |") for line in lines)
    assert len([line for line in lines if line.startswith("| 2 GPUs |")]) == 3


def test_the_tables_of_a_model(capsys):
    simulate_pipeline.main(recipes=("wan2.1-14b",), gpus=(8,))
    out = capsys.readouterr().out
    assert "| forward pass, TFLOP | 1695 |" in out
    assert "| 8 GPUs | colocated | none fits: needs 92 GB |" in out


def test_a_wrong_flag_is_an_error_of_one_line(tmp_path):
    with pytest.raises(SystemExit, match="error: --against needs --run"):
        simulate_pipeline.main(against=(tmp_path,))


@pytest.mark.slow
def test_the_simulation_alone_imports_no_torch():
    words = "import sys; sys.path.insert(0, 'scripts'); import pipeline, wan_costs; assert 'torch' not in sys.modules"
    done = shell(sys.executable, "-c", words)
    assert done.returncode == 0, done.stderr
