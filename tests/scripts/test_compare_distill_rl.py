"""scripts/compare_distill_rl.py: its rows are runs, its calls are those that were counted, and nothing runs twice."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import ALONE, REPO

from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings import command_line

sys.path.insert(0, str(REPO / "scripts"))
import compare_distill_rl as compare

FEW = {"num_steps": 4, "solver": "sde", "shift": 5.0, "guidance_scale": 1.0}
CALLS = {"dance_grpo": compare.DANCE, "distill_rl": compare.JOINT, "reward_gradient": compare.GRADIENT}
ROWS = [("plain", name) for name in compare.PLAIN] + [("hackable", "chain"), ("hackable", "joint 0.05")]
ROWS += [("tune", f"tune {name} {rates[0]}") for name, (_, _, rates) in compare.RATES.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "name"), ROWS)
def test_every_row_is_a_run_of_the_calls_that_set_its_steps(table, name, monkeypatch):
    kind = compare.TABLES[table][name]
    trained = FEW | ({"chunks": {"chunk_frames": 1}} if kind.start == "self_forcing" else {})
    monkeypatch.setattr(command_line, "trained_sampler", lambda spec: trained)
    run = command_line.parse([*kind.flags.split(), *(["--init-from", "a"] if kind.start else [])])
    check(replace(run, init_from=None), ALONE)  # the run that it starts from is not made here
    config, steps = run.algorithm, run.sampler.num_steps
    samples = config.batch_size if run.method == "reward_gradient" else config.num_prompts * config.num_samples
    assert (samples, steps, run.sampler.guidance_scale) == (compare.ROLLOUT, 4, 1)
    assert run.sampler.chunks.causal == (kind.start == "self_forcing")
    calls = steps
    if run.method != "reward_gradient":
        surrogate = run.method == "dance_grpo" or config.surrogate.weight > 0
        calls += round((steps - 1) * config.timestep_fraction) if surrogate else 0
    if run.method == "distill_rl":
        calls += 1 + 1 + (2 if config.matching.guidance_scale != 1 else 1) + config.critic_updates
    expected = compare.TILTED if "tilt" in name else CALLS[run.method]
    assert calls * samples == expected
    if table == "plain" and kind.start == "dmd2":
        assert kind.steps * expected == pytest.approx(compare.DANCE_STEPS * compare.DANCE, rel=0.04)


def write(folder, steps: dict[int, dict[str, float]], tokens: float) -> None:
    """Write the metrics of a run: validations by step, and a training step of so many tokens before each."""
    folder.mkdir(parents=True)
    lines = []
    for step, values in steps.items():
        if step:
            lines.append({"step": step, "train/seconds": 2.0, "train/tokens_per_second": tokens / 2})
        lines.append({"step": step} | {f"validation/{name}": value for name, value in values.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two seeds of the hackable reward; nothing may be started."""

    def values(reward, frechet):
        return {"reward": reward, "accuracy": 0.5, "frechet": frechet, "reward_hacking": 1.0}

    runs = SimpleNamespace(run=lambda *given, **more: pytest.fail("a run was started"))
    monkeypatch.setattr(compare, "subprocess", runs)
    for seed in (0, 1):
        write(tmp_path / f"dmd2-{seed}", {0: {"reward": 1.0}, 400: values(4.0, 6.0)}, 8000.0)
        start = values(4.0, 6.0)
        chain = {0: start, 4: values(5.0, 8.0), 8: values(8.0, 16.0 + seed), 16: values(9.0, 80.0)}
        joint = {0: start, 4: values(6.0, 6.5), 12: values(8.1, 7.0), 16: values(9.5, 8.0)}
        write(tmp_path / f"chain-{seed}", chain, 800.0)
        write(tmp_path / f"joint_0.05-{seed}", joint, 1600.0)
    return tmp_path


def test_joint_runs_are_compared_at_the_reward_of_the_chain(runs, capsys):
    """Joint reaches 8.1 after 12 steps at distance 7: 1 above the start, where the chain is 10 and 11 above it."""
    compare.main(output=runs, seeds=(0, 1), tables=("hackable",), kinds=("chain", "joint 0.05"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[3:]]
    rows = {row[0]: row for row in lines}
    equal = rows["joint 0.05, nearest reward"]
    assert equal[1:5] == ["0 1", "24 24", "0.0 ± 0.0", "8.10 ± 0.00"] and equal[-1] == "0.10 ± 0.01"
    assert rows["chain, 16 updates"][2] == "16 16" and rows["chain, 16 updates"][-1] == "1.00 ± 0.00"
    assert rows["joint 0.05, end"][2] == "32 32" and rows["chain, 32 updates"][4] == "9.00 ± 0.00"


def test_calls_are_the_counted_tokens_of_a_run_and_of_its_start(runs):
    kind = compare.HACKABLE["chain"]
    assert compare.calls_until(runs, "chain", kind, 0, 8) == 8000 / 80 + 2 * 800 / 80
    assert compare.calls_until(runs, "chain", kind, 0, 16) == 8000 / 80 + 3 * 800 / 80


def test_rows_without_a_finished_run_are_left_out(runs, capsys):
    compare.main(output=runs, seeds=(0, 1), run=False)
    text = capsys.readouterr().out
    assert "| dmd2 | 0 1 | 400 |" in text and "joint 0.01" not in text and "critic tilt" not in text


@pytest.mark.slow
def test_the_picture_has_a_curve_for_each_weight(runs):
    compare.main(output=runs, seeds=(0,), tables=("hackable",), run=False, picture=runs / "picture.png")
    assert (runs / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_starts_are_made_first_and_stopped_runs_go_on(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=lambda words, check: started.append(words[3:])))
    (tmp_path / "causal-2").mkdir()
    (tmp_path / "causal-2" / "config.yaml").write_text("")
    name = "self_forcing, then dance_grpo"
    compare.finish(tmp_path, name, compare.PLAIN[name], 2)
    assert started[0] == ["--resume", str(tmp_path / "causal-2"), "--steps", "100"]
    start, run = ("self_forcing-2", "self_forcing-dance_grpo-2")
    assert [words[words.index("--output") + 1] for words in started[1:]] == [str(tmp_path / x) for x in (start, run)]
    assert started[1][started[1].index("--init-from") + 1] == str(tmp_path / "causal-2")
    tune = next(iter(compare.TUNE))
    compare.finish(tmp_path, tune, compare.TUNE[tune], 2)
    seeds = [words[words.index("--seed") + 1] for words in started[-2:]]
    assert seeds == ["2", "102"]  # of the distilled student, and of a run that is not reported
