"""The length of a run: passes over its data, shares of its updates, growing batches; and runs that only validate."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from cells import methods
from helpers import ALONE, REPO, SMALL, assert_same, checkpoint_of, cut_off, files_of, metrics_of, refused, run

from unified_trainer.__main__ import main
from unified_trainer.data.loader import Loader
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.learner import Learner
from unified_trainer.run.guards.hacking_monitor import HackingMonitor
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.report.run_folder import read_run
from unified_trainer.tools.report.status import status_of

pytestmark = pytest.mark.slow  # seconds together

GOLDEN = json.loads((REPO / "tests" / "golden" / "runs.json").read_text(encoding="utf-8"))
CONTINUES = "streaming_tuning"  # the method whose samples go on from step to step
NEVER = ("--validate-every", "0")


def small(method: str) -> list[str]:
    """The flags of a small run without its number of steps."""
    words = SMALL[method]
    return words[: words.index("--steps")] + words[words.index("--steps") + 2 :]


def run_epochs(folder: Path, epochs: str) -> None:
    assert main([*small("finetune"), "--output", str(folder), "--epochs", epochs]) == 0


def settings(folder: Path) -> dict:
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def planned(*words: str):
    return check(parse([*words, "--device", "cpu"]), ALONE)


# Epochs.


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (("--epochs", "3"), 6),  # of 4 clips, 2 a step
        (("--epochs", "1", "--data.num-clips", "5"), 3),  # the last step reaches into the next epoch
        (("--epochs", "2", "--data.num-clips", "5"), 5),
        (
            ("--epochs", "2", "--ramp-up.start", "1", "--ramp-up.increment", "1", "--ramp-up.samples", "3"),
            6,  # 3 clips in steps of one, and 5 in steps of two
        ),
    ],
)
def test_epochs_are_the_fewest_steps_that_take_each_clip_so_often(flags, steps):
    plan = planned(*small("finetune"), *flags)
    assert plan.run.steps == steps
    assert plan.counts["training steps"].startswith(f"{steps}, ")


def test_epochs_count_prompts_and_not_the_samples_of_each(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\ne\n")
    words = [*small("dance_grpo"), "--prompts", str(tmp_path / "prompts.txt")]
    assert planned(*words, "--epochs", "2").run.steps == 5
    plan = planned(*words, "--steps", "4")
    assert plan.counts["training steps"] == "4, 1.6 epochs of 5 prompts"
    assert not any("repeat within a training step" in note for note in plan.notes)
    (tmp_path / "prompts.txt").write_text("a\n")
    short = "warning: prompts repeat within a training step: it takes 2, and the data have 1"
    assert short in planned(*words, "--steps", "4").notes


def test_a_run_of_epochs_runs_again_from_its_config_and_is_extended(run_folder, tmp_path, capsys):
    run_epochs(run_folder, "2")
    assert (settings(run_folder)["epochs"], settings(run_folder)["steps"]) == (2, 4)
    assert main(["--config", str(run_folder / "config.yaml"), "--output", str(tmp_path / "again")]) == 0
    assert_same(checkpoint_of(run_folder, 4), checkpoint_of(tmp_path / "again", 4))
    assert main(["--resume", str(run_folder)]) == 0  # it has all its steps
    assert main(["--resume", str(run_folder), "--epochs", "3"]) == 0
    assert "steps" not in [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    run_epochs(tmp_path / "whole", "3")
    assert_same(checkpoint_of(run_folder, 6), checkpoint_of(tmp_path / "whole", 6))
    assert "--epochs 1 is too few" in refused(capsys, "--resume", run_folder, "--epochs", "1")
    assert "epochs 3 decides it" in refused(capsys, "--resume", run_folder, "--steps", "9")
    assert main(["--resume", str(run_folder), "--steps", "7", "--epochs", "0"]) == 0
    assert settings(run_folder)["steps"] == 7


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*SMALL["finetune"], "--epochs", "2"), "--steps: epochs 2 decides it. Leave one out, or set --epochs 0"),
        (("--method", "dance_grpo", "--algorithm.failure-below", "1", "--epochs", "2"), "draws prompts by failures"),
        (("--method", CONTINUES, "--epochs", "2"), "takes new prompts where its streams begin alone"),
        (("--method", "dance_grpo", "--algorithm.failure-below", "1", "--data.no-shuffle"), "drawn by failures"),
    ],
)
def test_lengths_and_orders_that_cannot_be_are_refused(flags, said, capsys):
    assert said in refused(capsys, *flags)


def test_a_term_that_begins_after_the_epochs_is_refused(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\n")
    words = ["--method", "distill_rl", "--prompts", tmp_path / "prompts.txt", "--algorithm.num-prompts", "4"]
    words += ["--algorithm.prompts-per-update", "2", "--algorithm.surrogate.first-step", "3"]
    assert "first_step 3 must be below the run's steps (2)" in refused(capsys, *words, "--epochs", "2")


# Shares of a run's updates.


@pytest.mark.parametrize(
    ("flags", "role", "updates"),
    [
        ("--method dmd2 --steps 11 --algorithm.student-every 5", "student", 3),  # in steps 0, 5 and 10
        ("--method dmd2 --steps 11 --algorithm.student-every 5 --algorithm.critic-warmup-steps 2", "student", 2),
        ("--method dmd2 --steps 11 --algorithm.student-every 5", "critic", 11),
        ("--method dmd2 --steps 11 --algorithm.update-schedule exclusive", "critic", 8),
        ("--method dance_grpo --steps 3 --algorithm.num-prompts 8 --algorithm.prompts-per-update 2", "student", 12),
        (
            "--method distill_rl --steps 2 --algorithm.num-prompts 8 --algorithm.prompts-per-update 4 "
            "--algorithm.critic-updates 3",
            "critic",
            12,
        ),
        ("--method dance_ppo --steps 5 --algorithm.value-warmup-steps 2", "student", 6),
        ("--method dance_ppo --steps 5 --algorithm.value-warmup-steps 2", "value", 10),
    ],
)
def test_a_share_is_one_of_the_role_s_own_updates(flags, role, updates):
    run = parse(flags.split())
    assert run.algorithm.updates(role, run.steps, run.sampler) == updates


def test_a_warm_up_of_a_share_is_that_of_its_count_and_goes_on_when_the_run_is_extended(run_folder, tmp_path):
    share = ("--student.warmup-ratio", "0.5", "--student.lr-decay-ratio", "1", "--student.lr-schedule", "linear")
    run("finetune", run_folder, "--steps", "8", *share)
    student = settings(run_folder)["student"]
    assert (student["warmup_updates"], student["lr_decay_updates"]) == (4, 4)
    count = ("--student.warmup-updates", "4", "--student.lr-decay-updates", "4", "--student.lr-schedule", "linear")
    run("finetune", tmp_path / "count", "--steps", "8", *count)
    assert metrics_of(run_folder) == metrics_of(tmp_path / "count")
    for folder in (run_folder, tmp_path / "count"):
        assert main(["--resume", str(folder), "--steps", "10"]) == 0
    assert_same(checkpoint_of(run_folder, 10), checkpoint_of(tmp_path / "count", 10))


def test_shares_follow_the_epochs():
    plan = planned(*small("finetune"), "--epochs", "10", "--student.warmup-ratio", "0.1")
    assert plan.run.roles["student"].warmup_updates == 2


def test_a_share_takes_the_place_of_a_recipe_s_count_and_not_of_one_beside_it(capsys, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: tiny\ncommon:\n  student: {warmup_updates: 7}\n")
    given = [*SMALL["finetune"], "--recipe", str(recipe), "--steps", "10", "--student.warmup-ratio", "0.2"]
    assert planned(*given).run.roles["student"].warmup_updates == 2
    assert "student.warmup_ratio 0.2 decides it" in refused(capsys, *given, "--student.warmup-updates", "3")


def test_experts_that_are_drawn_have_no_share(capsys):
    words = [*SMALL["finetune"], "--student.boundary", "0.5", "--student.warmup-ratio", "0.5"]
    assert planned(*words).run.roles["student"].warmup_updates == 1
    assert "how many updates an expert makes is drawn" in refused(capsys, *words, "--student.expert-balance", "equal")


# Every method.


@pytest.mark.slow
@pytest.mark.parametrize("method", methods())
def test_every_method_has_epochs_shares_file_order_and_a_growing_batch(method, run_folder, tmp_path, monkeypatch):
    """The run takes each row twice in the order of the file, counts its updates, and resumes bit for bit."""
    (tmp_path / "prompts.txt").write_text("".join(f"a {word} circle\n" for word in "abcdef"))
    words = [*GOLDEN[method]["flags"], "--checkpoint-every", "1", "--keep-last", "9", *NEVER, "--data.no-shuffle"]
    length = words.index("--steps")
    del words[length : length + 2]
    if parse(words).trains_on == "prompts":
        words += ["--prompts", str(tmp_path / "prompts.txt")]
    sizes = parse(words).algorithm.plan()
    half = sizes.prompts_per_update * sizes.num_samples // 2
    rising = ("--ramp-up.start", half, "--ramp-up.increment", half, "--ramp-up.samples", 2 * half)
    words += ["--steps", "3"] if method == CONTINUES else ["--epochs", "2", *map(str, rising)]
    words += ["--student.warmup-ratio", "0.5"]

    seen, batch_of, step = [], Loader.batch_of, Learner.step
    monkeypatch.setattr(Loader, "batch_of", lambda self, rows, ids: seen.append(rows) or batch_of(self, rows, ids))
    made: dict[str, int] = {}

    def counting(self, norm):
        made[self.name] = made.get(self.name, 0) + 1
        return step(self, norm)

    monkeypatch.setattr(Learner, "step", counting)
    assert main([*words, "--output", str(run_folder)]) == 0
    saved = parse(["--resume", str(run_folder)])
    assert (
        made == {role: saved.algorithm.updates(role, saved.steps, saved.sampler) for role in made} and "student" in made
    )
    assert saved.roles["student"].warmup_updates == max(1, round(made["student"] / 2))
    if method != CONTINUES:
        rows = [row for batch in seen for row in batch[:: sizes.num_samples]]
        count = len(set(rows))
        assert rows == [row % count for row in range(len(rows))] and count in (4, 6)
        assert 2 * count <= len(rows) < 2 * count + sizes.prompts

    cut = cut_off(run_folder, tmp_path / "cut", saved.steps - 1)
    assert main(["--resume", str(cut)]) == 0
    assert_same(checkpoint_of(run_folder, saved.steps), checkpoint_of(cut, saved.steps))


# A run that validates and ends.


VALIDATED = ("--validate-every", "1", "--checkpoint-every", "1")


def test_validate_only_gives_the_first_validation_of_a_run_and_makes_no_step(run_folder, tmp_path, monkeypatch):
    run("finetune", run_folder, *VALIDATED)
    expected, *_ = metrics_of(run_folder)
    monkeypatch.setattr("unified_trainer.run.trainer.Trainer.step", None)  # no step is made
    run("finetune", tmp_path / "only", *VALIDATED, "--validate-only", "--report")
    assert metrics_of(tmp_path / "only") == [expected]
    assert (tmp_path / "only" / "report.html").is_file() and not (tmp_path / "only" / "checkpoints").exists()
    status = status_of(read_run(tmp_path / "only"))
    assert (status.state, status.step) == ("finished", 0)


def test_validate_only_of_a_saved_run_repeats_its_last_validation(run_folder, tmp_path):
    run("finetune", run_folder, *VALIDATED)
    before, lines = files_of(run_folder), metrics_of(run_folder)
    assert main(["--resume", str(run_folder), "--validate-only"]) == 0
    after = files_of(run_folder)
    assert metrics_of(run_folder) == lines
    changed = {name for name in after if before.get(name) != after[name]}
    assert {Path(name).parts[0] for name in changed} <= {"metrics.jsonl", "environment.jsonl", "validation"}
    run("finetune", tmp_path / "other", *VALIDATED, "--init-from", f"{run_folder}:ema", "--validate-only")
    (row,) = metrics_of(tmp_path / "other")
    assert {**row, "step": 1} == lines[-1]


def test_a_run_that_only_validated_may_be_trained_on(run_folder, tmp_path):
    run("finetune", run_folder, *VALIDATED, "--validate-only")
    assert main(["--resume", str(run_folder), "--no-validate-only"]) == 0
    run("finetune", tmp_path / "plain", *VALIDATED)
    assert_same(checkpoint_of(run_folder, 1), checkpoint_of(tmp_path / "plain", 1))


def test_a_guard_does_not_act_in_a_run_that_only_validates(run_folder, monkeypatch):
    run("dance_grpo", run_folder, *VALIDATED)
    monkeypatch.setattr(HackingMonitor, "after_validation", lambda self, step, metrics: pytest.fail("a guard looked"))
    assert main(["--resume", str(run_folder), "--validate-only"]) == 0


def test_validate_only_without_validations_is_refused(capsys):
    said = refused(capsys, *SMALL["finetune"], "--validate-only")
    assert "--validate-only: validate_every 0 leaves validations out" in said


# Checkpoints.


def test_a_run_that_was_saved_with_one_switch_of_offload_has_both(tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text("recipe: tiny\nmethod: dmd2\nparallel: {offload: true}\n")
    parallel = parse(["--config", str(saved)]).parallel
    assert (parallel.offload_weights, parallel.offload_optimizer) == (True, True)


@pytest.mark.parametrize(("every", "saved"), [("2", [2, 3]), ("0", [3]), ("-1", [])])
def test_which_steps_are_saved(run_folder, every, saved):
    run("finetune", run_folder, "--steps", "3", "--checkpoint-every", every, "--keep-last", "9")
    folders = (run_folder / "checkpoints").glob("step_*")
    assert sorted(int(folder.name.removeprefix("step_")) for folder in folders) == saved
    assert status_of(read_run(run_folder)).state == "finished"
    if not saved:
        assert main(["--resume", str(run_folder)]) == 0  # from the beginning
        assert [row["step"] for row in metrics_of(run_folder)] == [1, 2, 3]


@pytest.mark.parametrize(
    "more",
    [
        ("--keep-best", "1", "--validate-every", "1"),
        ("--checkpoint-minutes", "5"),
        ("--checkpoint-mirror", "file:///x"),
    ],
)
def test_a_run_that_saves_nothing_has_no_rule_of_checkpoints(more, capsys):
    said = refused(capsys, *SMALL["finetune"], "--checkpoint-every", "-1", *more)
    assert f"{more[0].removeprefix('--').replace('-', '_')} needs checkpoints" in said


def test_weights_that_are_not_finite_end_a_run_that_saves_nothing(run_folder, monkeypatch):
    monkeypatch.setattr(Learner, "state_dict", lambda self: {"weights/x": torch.tensor([float("nan")])})
    assert main([*SMALL["finetune"], "--checkpoint-every", "-1", "--output", str(run_folder)]) != 0


def test_the_two_ranks_of_a_grown_batch_are_checked_before_anything_is_loaded():
    words = [*SMALL["finetune"], "--algorithm.batch-size", "4", "--ramp-up.start", "1", "--ramp-up.increment", "1"]
    with pytest.raises(ValueError, match="2 ranks do not divide an update of 1 samples"):
        check(parse([*words, "--ramp-up.samples", "6"]), Mesh(ALONE.device, size=2))
