"""scripts/compare_rl.py: every row runs, what is finished is not run again, and the table is of what was measured."""

import json
import statistics
import sys
from dataclasses import replace

import pytest
from helpers import ALONE, REPO

from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings import command_line

sys.path.insert(0, str(REPO / "scripts"))
import compare_rl


@pytest.mark.slow
@pytest.mark.parametrize("name", compare_rl.KINDS)
def test_the_flags_of_every_row_are_a_run_whose_calls_are_counted(name, monkeypatch):
    """Network calls per sample: those of the sampler, and of each trained transition or level."""
    kind = compare_rl.KINDS[name]
    of_dmd2 = {"num_steps": 4, "solver": "sde", "shift": 5.0, "guidance_scale": 1.0}
    trained = of_dmd2 if kind.starts_from == "dmd2" else None
    flags = kind.flags.split() + (["--init-from", "a"] if kind.starts_from else [])
    monkeypatch.setattr(command_line, "trained_sampler", lambda spec: trained)
    run = command_line.parse(flags)
    check(replace(run, init_from=None), ALONE)  # the run that it starts from is not made here
    if run.method == "flow_dpo":  # each clip of a pair by student and reference; as many clips as samples of the others
        assert (kind.rollout, kind.trained, 2 * run.algorithm.batch_size) == (0, 2, 64)
        return
    steps, group = run.sampler.num_steps, run.algorithm.num_samples
    if steps == 20:  # the calls up to the first stochastic transition are made once for a group: equal noise
        starts = range(16) if run.algorithm.window.size else [0]
        outside = run.algorithm.window.outside_steps or steps - run.algorithm.window.size
        before = [max(start > 0, round(outside * start / 16)) for start in starts]
        calls = outside + run.algorithm.window.size
        mean = sum(calls - (shared + 1) * (1 - 1 / group) for shared in before) / len(starts)
        assert kind.rollout == round(mean)
        assert kind.trained == (run.algorithm.window.size or round((steps - 1) * run.algorithm.timestep_fraction))
        return
    chunks = len(run.sampler.chunks.ranges(5)) if run.sampler.chunks.causal else 1
    assert kind.rollout == (chunks * steps + chunks - 1) / chunks and run.sampler.guidance_scale == 1
    if run.method == "online_dpo":  # two of a group, by student and reference
        assert kind.trained == 2 * run.sampler.num_steps * 2 / run.algorithm.num_samples
    elif run.method in ("diffusion_nft", "awm"):
        assert kind.trained == 2 * run.sampler.num_steps * run.algorithm.timestep_fraction
    elif run.method == "crd":  # the student twice, its moving average, and both branches of a guided reference
        assert kind.trained == (5 if run.algorithm.kl_coefficient else 3) * run.sampler.num_steps
    elif run.method == "dance_ppo":  # the values of all states, the update of the values, and that of the policy
        assert kind.trained == 3 * (run.sampler.num_steps - 1) and run.algorithm.timestep_fraction == 1
    else:
        fraction = (run.sampler.num_steps - 1) * run.algorithm.timestep_fraction
        assert kind.trained == (run.algorithm.window.size or fraction)


def test_the_table(tmp_path, capsys, monkeypatch):
    """Runs that are there: none is started again; mean and Bessel's spread over the seeds."""
    started = []
    monkeypatch.setattr(compare_rl.subprocess, "run", lambda words, check: started.append(words))
    for seed, reward in ((0, 3.0), (1, 4.0)):
        folder = tmp_path / f"window_of_2-{seed}"
        folder.mkdir()
        lines = [{"step": 0, "validation/reward": 2.0, "validation/accuracy": 0.5}, {"step": 1, "train/reward": 9.0}]
        lines += [{"step": 7, "validation/reward": reward, "validation/accuracy": 0.75}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    compare_rl.main(output=tmp_path, steps=6, seeds=(0, 1), kinds=("window of 2",))
    *_, last = capsys.readouterr().out.splitlines()
    spread = statistics.stdev([3.0, 4.0])
    assert last == f"| window of 2 | 7 | 42 | 2.000 ± 0.000 | 3.500 ± {spread:.3f} | 0.500 ± 0.000 | 0.750 ± 0.000 |"
    assert not started


def test_pairs_of_own_samples_are_made_once_and_their_calls_counted(tmp_path, monkeypatch):
    """96 prompts, 8 samples and 4 calls each, are 48 for each of the 64 samples of a step."""
    assert compare_rl.KINDS["flow_dpo of own pairs"].before == 96 * 8 * 4 / 64
    started = []
    monkeypatch.setattr(compare_rl, "run", lambda folder, steps, flags: started.append(["run", folder.name]))
    monkeypatch.setattr(compare_rl, "command", lambda *words: started.append(words))
    flags = compare_rl.own_pairs(tmp_path, 96, 1, [])
    assert flags == [
        word
        for key, side in (("path", "preferred"), ("rejected", "rejected"))
        for word in (f"--data.{key}", str(tmp_path / "pairs-1" / side))
    ]
    start, (rollout, *asked), (preprocess, *_) = started
    assert (start, rollout, preprocess) == (["run", "start"], "rollout", "preprocess")
    assert asked[asked.index("--seed") + 1] == "1000000" and len({*asked[2:98]}) == 96
    (tmp_path / "pairs-1").mkdir()
    assert compare_rl.own_pairs(tmp_path, 96, 1, []) == flags and len(started) == 4


def test_what_is_missing_is_run_and_what_was_stopped_goes_on(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(compare_rl.subprocess, "run", lambda words, check: started.append(words[3:]))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.yaml").write_text("")
    for name in ("there", "new"):
        with pytest.raises(IndexError):  # nothing was measured, because nothing ran
            compare_rl.run(tmp_path / name, 5, ["--method", "dance_grpo"])
    assert started[0] == ["--resume", str(tmp_path / "there"), "--steps", "5"]
    assert started[1][:2] == ["--method", "dance_grpo"] and started[1][-2:] == ["--steps", "5"]
