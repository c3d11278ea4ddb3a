"""What matching compares reaches the run directory and the trackers as videos, and changes no number."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from cells import cells
from expert_world import trainer as expert_trainer
from forked import program
from helpers import REPO, assert_same, checkpoint_of, dmd2, metrics_of, tiny_codec
from test_shown_rollouts import Noted, of_steps, tracked

from unified_trainer.__main__ import main
from unified_trainer.data.video_files import to_uint8
from unified_trainer.methods.distribution_matching import MatchingMethod
from unified_trainer.methods.dmd2 import DMD2Config
from unified_trainer.methods.finetune import Finetune
from unified_trainer.methods.rcm import RCM
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.numerics.flow import add_noise, x0_from_velocity
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.reward import RewardSum
from unified_trainer.run.registry import METHODS, method_named
from unified_trainer.run.settings.config import ConfigError, RunConfig, TrackingConfig, ValidationConfig, run_class
from unified_trainer.run.tracking import shown as shown_steps
from unified_trainer.run.tracking.shown import check_rollouts, show_steps

sys.path.insert(0, str(REPO / "scripts"))
import make_golden_runs

pytestmark = pytest.mark.slow  # seconds together

CONFIG = DMD2Config(batch_size=4, micro_batch=1, guidance_scale=2.0, student_every=1)
NAMES = ["x", "x_tau", "real", "fake", "g"]


def run_of(config, every=2, videos=3):
    run = run_class(method_named("dmd2"))()
    return replace(
        run,
        algorithm=config,
        tracking=TrackingConfig(rollouts_every=every),
        validation=ValidationConfig(num_videos=videos),
    )


class NotedMatching(Noted):
    """Notes what matching compares too."""

    def log_rollouts(self, step, samples, contact_sheet):
        self.calls.append((step, [sample.row() for sample in samples], contact_sheet.is_file()))


@pytest.fixture
def decoded(monkeypatch):
    """The latents that are decoded from now on, in order."""
    seen, decode = [], WanCodec.decode

    def noting(self, latents):
        seen.append(latents.clone())
        return decode(self, latents)

    monkeypatch.setattr(WanCodec, "decode", noting)
    return seen


def steps_shown(one, run, folder, steps) -> list[int]:
    """Make training steps, log each as a run does, and return those that were shown."""
    folder.mkdir(exist_ok=True)
    with tracked(folder) as (tracker, _):
        seen = NotedMatching()
        tracker.add(seen)
        show_steps(one.method, tiny_codec(), RewardSum(RunConfig().reward), run, folder, tracker)
        for step in steps:
            tracker.log(step + 1, one.step(step))
    return [call[0] for call in seen.calls if call[1] != "metrics"]


def test_it_is_what_the_student_learns_from_and_nothing_else_changes(tmp_path, decoded, monkeypatch):
    """Latents from their definitions: the noise and level of each sample, teacher and critic at the weights of then."""
    expected, one, written = of_steps(dmd2(CONFIG, moves=True)), dmd2(CONFIG, moves=True), {}
    whole = shown_steps.write_samples
    monkeypatch.setattr(
        shown_steps,
        "write_samples",
        lambda folder, clips, *rest: written.update({folder: clips}) or whole(folder, clips, *rest),
    )
    source, losses = one.method.matching.direction, []
    one.method.matching.direction = lambda x0, *rest: losses.append((x0.detach(), source(x0, *rest))) or losses[-1][1]
    with tracked(tmp_path) as (tracker, _):
        seen = NotedMatching()
        tracker.add(seen)
        show_steps(one.method, tiny_codec(), RewardSum(RunConfig().reward), run_of(CONFIG), tmp_path, tracker)
        metrics = []
        for step in range(3):
            metrics.append(one.step(step))
            assert (step == 1) == bool(one.method.matching.direction._kept) and (step > 1) == bool(decoded)
            tracker.log(step + 1, metrics[-1])
    assert metrics == expected

    calls = [call for call in seen.calls if call[1] != "metrics"]
    [(step, rows, sheet)], folder = calls, tmp_path / "matching" / "step_2"
    assert step == 2 and sheet and [file.name for file in (tmp_path / "matching").iterdir()] == ["step_2"]
    assert [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()] == rows
    assert len(rows) == len(decoded) == 15 and all((folder / row["video"]).is_file() for row in rows)
    assert [row["shows"].partition(",")[0] for row in rows] == NAMES * 3
    frames = [to_uint8(tiny_codec().decode(latents))[0] for latents in decoded[:15]]
    assert all(np.array_equal(*pair) for pair in zip(written[folder], frames, strict=True))

    batch = one.loader.batch(1)
    for row, (x0, direction) in enumerate(losses[4:7]):  # the micro-batches of step 2
        x, x_tau, real, fake, g = decoded[5 * row : 5 * row + 5]
        noise = Streams(0, 1).noise("student tau noise", batch.sample_ids[row : row + 1], batch.latent_shape)
        tau = float(rows[5 * row]["shows"].partition("tau ")[2])
        assert rows[5 * row]["sample"] == batch.sample_ids[row] and rows[5 * row]["prompt"] == batch.prompts[row]
        assert torch.equal(x, x0)
        torch.testing.assert_close(x_tau, add_noise(x, noise, direction.tau))
        assert float(direction.tau) == pytest.approx(tau, abs=6e-4)
        assert float(g.square().mean()) == pytest.approx(1, rel=1e-4)
        torch.testing.assert_close(g / g.norm(), (fake - real) / (fake - real).norm())
        width = (x - real).abs().mean()
        torch.testing.assert_close((fake - real) / width, direction.gradient)


def test_real_is_the_guided_x0_of_the_teacher_and_fake_the_critics(tmp_path, decoded):
    one, teacher, critic = dmd2(CONFIG), *(dmd2(CONFIG).method.matching.teacher, dmd2(CONFIG).method.matching.critic)
    assert steps_shown(one, run_of(CONFIG, every=1, videos=1), tmp_path, [0]) == [1]
    _, x_tau, real, fake, _ = decoded
    batch = one.loader.batch(0).take([0])
    sigma = one.method.matching.direction._source.__self__._noise_levels("student tau", batch, Streams(0, 0))[0]
    with torch.no_grad():
        guided = teacher.guided_velocity(x_tau, sigma, batch.cond, batch.uncond, 2.0)
        velocity = critic.velocity(x_tau, sigma, batch.cond)
    torch.testing.assert_close(real, x0_from_velocity(x_tau, guided, sigma))
    torch.testing.assert_close(fake, x0_from_velocity(x_tau, velocity, sigma))


@pytest.mark.parametrize(
    ("every", "student_every", "warmup", "expected"),
    [(2, 1, 0, [2, 4, 6, 8]), (3, 2, 0, [3, 7]), (2, 4, 0, [5]), (4, 3, 2, [6]), (8, 8, 0, [])],
)
def test_the_first_update_at_or_after_each_multiple_is_shown(tmp_path, every, student_every, warmup, expected):
    """The student moves in step 1 + warmup and each `student_every`-th after it; a resumed run shows the same."""
    config = replace(CONFIG, micro_batch=4, student_every=student_every, critic_warmup_steps=warmup)
    run = run_of(config, every, videos=1)
    assert steps_shown(dmd2(config), run, tmp_path / "one", range(8)) == expected
    assert steps_shown(dmd2(config), run, tmp_path / "two", range(4, 8)) == [step for step in expected if step > 4]


def test_only_the_main_rank_shows_it_and_only_where_it_is_asked_for(tmp_path):
    one = dmd2(CONFIG)
    source = one.method.matching.direction
    for run, active in ((run_of(CONFIG), False), (run_of(CONFIG, every=0), True)):
        with tracked(tmp_path, active) as (tracker, _):
            show_steps(one.method, tiny_codec(), RewardSum(RunConfig().reward), run, tmp_path, tracker)
        assert one.method.matching.direction == source


def test_a_full_disk_ends_nothing(tmp_path, capsys):
    (tmp_path / "matching").write_text("a file is in the way")
    assert steps_shown(dmd2(CONFIG), run_of(CONFIG), tmp_path, range(3)) == []
    assert "cannot be written" in capsys.readouterr().out


def test_where_teacher_and_critic_agree_g_is_zero(tmp_path, decoded):
    one = dmd2(CONFIG)
    source = one.method.matching.direction
    one.method.matching.direction = lambda *words: replace(source(*words), gradient=torch.zeros(1, 16, 2, 2, 2))
    steps_shown(one, run_of(CONFIG), tmp_path, range(2))
    assert not decoded[4].any()


def test_methods_that_match_have_a_look():
    run, having = replace(RunConfig(), tracking=TrackingConfig(rollouts_every=1)), []
    for name in METHODS:
        if issubclass(method_named(name), MatchingMethod):
            having.append(name)
            check_rollouts(run, method_named(name))
    assert having == ["distill_rl", "dmd2", "long_self_forcing", "rcm", "self_forcing", "streaming_tuning"]
    with pytest.raises(ConfigError, match="makes no rollouts and matches no teacher; set it to 0"):
        check_rollouts(run, Finetune)
    with pytest.raises(ConfigError, match=r"validation\.num_videos"):
        check_rollouts(replace(run, validation=ValidationConfig(num_videos=0)), RCM)


@pytest.mark.parametrize("two", [("student",), ("teacher", "critic"), ("student", "teacher", "critic")])
@pytest.mark.parametrize("method", ["dmd2", "self_forcing"])
def test_experts_and_causal_students_are_shown_and_move_as_without_it(method, two, tmp_path, decoded):
    one, other = (expert_trainer(method, two=two) for _ in range(2))
    run = replace(run_of(one.method.config, every=1, videos=2))
    assert steps_shown(one, run, tmp_path, range(2)) == [1, 2] and len(decoded) == 20
    assert all(torch.isfinite(x).all() for x in decoded)
    for step in range(2):
        other.step(step)
    for name, role in one.roles.items():
        for mine, theirs in zip(role.gradients, other.roles[name].gradients, strict=True):
            assert_same(mine, theirs)


MATCHING = [
    name for name, words in make_golden_runs.RUNS.items() if issubclass(method_named(words.split()[1]), MatchingMethod)
]


def axes_of(cell: tuple[str]) -> tuple[str, tuple[str, ...]]:
    """The method of a run, and what is shown of it."""
    return make_golden_runs.RUNS[cell[0]].split()[1], names_of(cell[0])


def names_of(run: str) -> tuple[str, ...]:
    return (*NAMES[:-1], *(["guided"] if run == "dmd2_decoupled" else []), "g")


@pytest.mark.slow
@pytest.mark.parametrize("name", cells(((name,) for name in MATCHING), axes_of))
def test_a_run_has_the_same_bits_with_it_and_without(name, tmp_path):
    words = [*make_golden_runs.RUNS[name].split(), "--checkpoint-every", "1", "--validation.num-videos", "2"]
    words += ["--keep-last", "9"]
    for every in (0, 1):
        assert main([*words, "--tracking.rollouts-every", str(every), "--output", str(tmp_path / f"{every}")]) == 0
    off, on = tmp_path / "0", tmp_path / "1"
    assert metrics_of(off) == metrics_of(on) and not (off / "matching").exists()
    last = len(metrics_of(off))
    assert_same(checkpoint_of(off, last), checkpoint_of(on, last))
    shown = [json.loads(line) for line in (on / "matching" / "step_1" / "samples.jsonl").read_text().splitlines()]
    assert [row["shows"].partition(",")[0] for row in shown] == 2 * [*names_of(name)]
    assert (on / "matching" / "step_1" / "contact_sheet.png").is_file()
    assert (on / "rollouts").exists() == (name == "distill_rl")


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_have_the_same_bits_with_it_and_without(tmp_path):
    words = [*make_golden_runs.RUNS["self_forcing"].split(), "--critic.boundary", "0.8"]
    for every in (0, 1):
        done = program(
            "-m", "unified_trainer", *words, "--checkpoint-every", "3", "--tracking.rollouts-every", every,
            "--validation.num-videos", "2", "--output", tmp_path / f"{every}", ranks=2,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    off, on = tmp_path / "0", tmp_path / "1"
    assert metrics_of(off) == metrics_of(on)
    assert_same(checkpoint_of(off, 3), checkpoint_of(on, 3))
    assert sorted(folder.name for folder in (on / "matching").iterdir()) == ["step_1", "step_3"]
