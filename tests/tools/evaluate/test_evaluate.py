"""The command evaluate: scores of the same samples as rollout and score, reuse, and what is refused."""

import gc
import json
import shutil
import weakref

import pytest
import torch
from evaluating import refused, table
from helpers import SHARP_AND_DARK, SMALL, TWO_PROMPTS, flags
from scripted import scripted_means

from unified_trainer.__main__ import main
from unified_trainer.tools.evaluate import checkpoints as parsing
from unified_trainer.tools.evaluate import evaluate as command
from unified_trainer.tools.evaluate.checkpoints import read_checkpoints
from unified_trainer.tools.evaluate.plan import NOISE_STEP

pytestmark = pytest.mark.slow

ASKED = ("--prompts", *TWO_PROMPTS, "--samples", "2", "--batch", "3", "--resamples", "200")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps with a large learning rate and a validation after each; step 1 has the better reward."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    moving = {"student.learning-rate": 1e-2, "student.ema-decay": 0.5, "sampler.num-steps": 2, "steps": 2}
    moving |= {"checkpoint-every": 1, "validate-every": 1, "validation.num-videos": 0, "reward.kind": "sharpness"}
    assert main([*SMALL["dance_grpo"], *flags(moving), "--reward.path", "", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "reward.yaml"
    file.write_text(SHARP_AND_DARK)
    return file


@pytest.fixture(scope="module")
def output(run, reward, tmp_path_factory):
    """An evaluation of two steps and the EMA weights."""
    folder = tmp_path_factory.mktemp("evaluated") / "out"
    chosen = [f"{run}@1", f"{run}@latest:weights", f"{run}:ema"]
    flags = ("--seeds", "0", "1", "--reward", str(reward), "--output", str(folder))
    assert main(["evaluate", *chosen, *ASKED, *flags]) == 0
    return folder


@pytest.mark.parametrize(("spec", "name"), [("@2", "run@2"), (":ema", "run@2:ema")])
def test_scores_are_those_of_rollout_and_score(run, reward, output, tmp_path, spec, name):
    """Bit for bit, on the same noise and in batches of the same size; held-out scorers too."""
    asked = ("--prompts", *TWO_PROMPTS, "--num-samples", "2", "--batch", "3", "--seed", str(NOISE_STEP))
    assert main(["rollout", f"{run}{spec}", *asked, "--output", str(tmp_path / "out")]) == 0
    assert main(["score", str(tmp_path / "out"), "--reward", str(reward), "--name", "other"]) == 0
    lines = (tmp_path / "out" / "scores" / "other.jsonl").read_text().splitlines()
    expected = [json.loads(line) for line in lines]
    found = [row for row in table(output, "samples.csv") if (row["checkpoint"], row["seed"]) == (name, "1")]
    assert [float(row["reward"]) for row in found] == [row["reward"] for row in expected]
    for scorer in ("sharpness", "dark", "motion_energy"):
        assert [float(row[f"reward/{scorer}"]) for row in found] == [row["parts"][scorer] for row in expected]
    assert [(row["prompt"], int(row["noise"])) for row in found] == [(row["prompt"], row["seed"]) for row in expected]


def test_ema_and_weights_differ_and_names_say_which(output):
    about = json.loads((output / "evaluation.json").read_text())
    assert [one["name"] for one in about["checkpoints"]] == ["run@1", "run@2", "run@2:ema"]
    assert [(one["step"], one["ema"]) for one in about["checkpoints"]] == [(1, False), (2, False), (2, True)]
    means = [one["mean"] for one in about["measures"]["reward"].values()]
    assert len({*means}) == 3


def test_all_files_are_there_and_agree(output):
    samples, differences = table(output, "samples.csv"), table(output, "differences.csv")
    assert len(samples) == 3 * 2 * 2 * 2
    videos = [row["video"] for row in samples if row["video"]]
    assert len(videos) == 3 * 2 * 2 and all((output / video).is_file() for video in videos)
    means = {(row["measure"], row["checkpoint"]): float(row["mean"]) for row in table(output, "measures.csv")}
    rewards = [float(row["reward"]) for row in samples if row["checkpoint"] == "run@1"]
    assert means["reward", "run@1"] == pytest.approx(sum(rewards) / len(rewards))
    (one,) = (row for row in differences if (row["measure"], row["left"], row["right"]) == ("reward", "run@1", "run@2"))
    assert float(one["difference"]) == pytest.approx(means["reward", "run@2"] - means["reward", "run@1"])
    assert float(one["low"]) <= float(one["difference"]) <= float(one["high"])
    assert {"evaluation.html", "votes.html"} <= {file.name for file in output.iterdir()}


def test_finished_checkpoints_are_used_again_and_only_what_fits(run, output, reward, tmp_path, monkeypatch):
    """One more checkpoint makes its own samples alone; another prompt, or trained-on weights, make all anew."""
    folder, made = tmp_path / "out", []
    shutil.copytree(output, folder)
    inner = command.measure
    monkeypatch.setattr(command, "measure", lambda *args: made.append(args[1].name) or inner(*args))
    asked = (*ASKED, "--reward", str(reward), "--output", str(folder))
    assert main(["evaluate", f"{run}@1", f"{run}@2", f"{run}@2,num_steps=1", *asked, "--seeds", "0", "1"]) == 0
    assert made == ["run@2,num_steps=1"]
    assert main(["evaluate", f"{run}@1", *asked, "--seeds", "0"]) == 0
    assert made[1:] == ["run@1"]


def test_one_model_is_in_memory_at_a_time(run, tmp_path, monkeypatch):
    alive, most = [], []
    inner = parsing.load_role

    def load(*args, **options):
        gc.collect()
        most.append(sum(one() is not None for one in alive))
        loaded = inner(*args, **options)
        alive.append(weakref.ref(loaded.role))
        return loaded

    monkeypatch.setattr(parsing, "load_role", load)
    asked = ("--prompts", "a", "b", "--resamples", "10", "--output", str(tmp_path / "out"))
    assert main(["evaluate", f"{run}@1", f"{run}@2", *asked]) == 0
    assert most == [0, 0]


def test_equal_weights_differ_by_nothing(run, tmp_path):
    """A model folder is a row too; the Frechet distance is to the samples of the first."""
    for name in ("one", "two"):
        shutil.copytree(run, tmp_path / name)
    held_out = ("--held-out", "motion_energy", "hpsv3", "--reward.scorers.hpsv3.path", "tiny")
    asked = ("--prompts", "a", "b", "--resamples", "10", "--output", str(tmp_path / "out"))
    chosen = (str(tmp_path / "one"), str(tmp_path / "two"), "tiny")
    assert main(["evaluate", *chosen, *asked, "--frechet-to", chosen[0], *held_out]) == 0
    rows = table(tmp_path / "out", "differences.csv")
    same = {row["measure"]: float(row["difference"]) for row in rows if row["right"] == "two@2"}
    other = {
        row["measure"]: float(row["difference"]) for row in rows if (row["left"], row["right"]) == ("one@2", "tiny")
    }
    assert same.keys() >= {"reward/hpsv3", "network_calls", "pixels/saturation", "frechet"}
    assert {value for name, value in same.items() if name != "samples_per_second"} == {0}
    assert other["reward"] != 0 and other["frechet"] > 1e-3
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["frechet_to"] == "one@2"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_fvd_to_clips_of_a_folder(run, tmp_path, capsys):
    """The samples of the first checkpoint as real clips: its own distances are those of the mp4's rounding."""
    asked = ("--prompts", "a", "b", "--resamples", "10", "--batch", "2")
    assert main(["evaluate", f"{run}@1", *asked, "--output", str(tmp_path / "first")]) == 0
    (clips,) = (tmp_path / "first" / "samples").iterdir()
    asked += ("--real-clips", str(clips), "--i3d", str(scripted_means(tmp_path / "i3d.pt")))
    assert main(["evaluate", f"{run}@1", "tiny", *asked, "--output", str(tmp_path / "out")]) == 0
    first, other = (float(row["mean"]) for row in table(tmp_path / "out", "measures.csv") if row["measure"] == "fvd")
    assert 0 <= first < 1e-2 < other
    capsys.readouterr()
    assert main(["evaluate", f"{run}@1", *asked, "--samples", "2", "--output", str(tmp_path / "more")]) == 2
    assert f"--real-clips {clips} holds 2 videos, fewer than the 4 samples of a seed" in capsys.readouterr().err


def test_videos_by_the_names_that_vbench_reads(run, tmp_path):
    """VBench takes each file of a folder for a video; the samples of all seeds are numbered on."""
    asked = ("--prompts", "a", "b, or c?", "--samples", "2", "--seeds", "3", "0", "--prompt-names", "--resamples", "10")
    assert main(["evaluate", f"{run}@1", *asked, "--output", str(tmp_path / "out")]) == 0
    (folder,) = (tmp_path / "out" / "samples").iterdir()
    names = {f"{prompt}-{index}.mp4" for prompt in ("a", "b, or c?") for index in range(4)}
    assert {file.name for file in (folder / "videos").iterdir()} == names
    rows = table(tmp_path / "out", "samples.csv")
    assert [row["video"].rpartition("-")[2] for row in rows if row["prompt"] == "a"] == [f"{i}.mp4" for i in range(4)]


def test_the_best_step_is_that_of_the_run(run):
    (best,) = read_checkpoints([f"{run}@best"], (), "")
    rewards = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["validation/reward"] for row in rewards if "validation/reward" in row and row["step"]}
    assert best.step == max(found, key=lambda step: found[step])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "evaluate needs a checkpoint: RUN"),
        (("RUN@7",), "RUN has no checkpoint of step 7; it has 1, 2"),
        (("nowhere",), "nowhere: nowhere does not exist; write RUN"),
        (("RUN:teacher",), "RUN:teacher does not exist; write RUN[@STEP|@best|@latest][:ema|:weights]"),
        (("tiny@3",), "tiny is a model folder, which has no steps"),
        (("RUN", "RUN@2"), "RUN@2 is RUN once more: name each checkpoint once"),
        (("RUN,speed=3",), "--sampler.speed is not known"),
        (("RUN,num_steps=0",), "num_steps must be from 1 to 1000, not 0"),
        (("RUN", "tiny", "--recipe", "tiny"), "tiny makes videos of 17 x 64 x 64"),
        (("RUN", "--frechet-to", "RUN@1"), "is none of the checkpoints; have RUN"),
        (("RUN", "--frechet-to", "RUN"), "--frechet-to RUN needs a scorer with image features"),
        (("RUN", "--seeds", "1", "1"), "--seeds 1 1: name one or more seeds, each once"),
        (("RUN", "--held-out", "sharpness"), "--held-out sharpness: it is the first scorer of the reward"),
        (("RUN", "--held-out", "beauty"), "kind beauty is no scorer"),
        (("RUN", "--confidence", "1"), "--confidence must be above 0 and below 1, not 1"),
        (("RUN", "--student.precision", "bf16"), "--student.precision: evaluate changes settings of sampler"),
        (("RUN", "--prompt-names", "--prompts", "a" * 250), "cannot name a file"),
        (("RUN", "--output", "RUN"), "is no folder of evaluations"),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_read(run, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    for name in ("load_role", "load_folder"):
        monkeypatch.setattr(parsing, name, lambda *args, **options: pytest.fail("weights were read"))
    given = [word.replace("RUN", str(run)) for word in words]
    asked = [
        *(() if "--prompts" in given else ("--prompts", "a")),
        *(() if "--output" in given else ("--output", "out")),
    ]
    assert said in refused(capsys, *given, *asked).replace(str(run), "RUN")
    assert not (tmp_path / "out").exists()


def test_prompts_are_needed_and_counted_once(run, tmp_path, capsys):
    assert "evaluate needs --prompts" in refused(capsys, run, "--output", tmp_path / "out")
    asked = ("--prompts", "a", "b", "a", "--resamples", "10", "--output", str(tmp_path / "out"))
    assert main(["evaluate", str(run), *asked]) == 0
    assert "prompts that occur again are left out: 1 of 3" in capsys.readouterr().out
    assert len(table(tmp_path / "out", "samples.csv")) == 2


def test_runs_without_ema_weights_say_so(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_2"
    from unified_trainer.run.checkpoint import manifest

    metadata = json.loads((folder / "manifest.json").read_text())
    kept = {name: entry for name, entry in metadata.pop("files").items() if "/ema/" not in name}
    del metadata["crc32"]
    (folder / "manifest.json").write_text(manifest.as_text({**metadata, "files": kept}))
    said = refused(capsys, f"{tmp_path / 'run'}:ema", "--prompts", "a", "--output", tmp_path / "out")
    assert "holds no EMA weights of student; leave :ema out" in said


def test_network_calls_are_counted_as_they_run(run):
    """Rows that went through the network for each sample, with guidance and without."""
    from helpers import LATENT_SHAPE, small_batch, trainable

    from unified_trainer.sampling.solver import SamplerConfig, generate
    from unified_trainer.tools.evaluate.samples import network_calls

    for scale in (1.0, 3.0):
        student, seen = trainable(), []
        student.network.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(len(given[0])))
        sampler = SamplerConfig(num_steps=3, guidance_scale=scale)
        generate(
            student, torch.zeros(2, *LATENT_SHAPE), small_batch(2), sampler, lambda s: torch.zeros(2, *LATENT_SHAPE)
        )
        assert sum(seen) == 2 * network_calls(sampler, LATENT_SHAPE[1])
