"""The commands rollout and score: files, continuing, and scoring again without overwriting."""

import json

import pytest
import torch
from helpers import (
    ALONE,
    SHARP_AND_DARK,
    SMALL,
    TWO_PROMPTS,
    copy_of,
    files_of,
    fill_disk,
    flags,
    refused,
    tiny_codec,
)
from safetensors.torch import load_file, save_file

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.rewards import pixels
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.rollout_folder import RolloutFolder
from unified_trainer.tools.sample.sample import videos

pytestmark = pytest.mark.slow

ASKED = ("--prompts", *TWO_PROMPTS, "--num-samples", "3", "--seed", "5", "--batch", "4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step with a large learning rate."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    moving = flags({"student.learning-rate": 1e-2, "sampler.num-steps": 2, "reward.scorers.saturation.weight": 2})
    assert main([*SMALL["dance_grpo"], *moving, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def rollouts(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts") / "out"
    assert main(["rollout", str(trained), *ASKED, "--output", str(folder), "--num-videos", "1"]) == 0
    return folder


@pytest.fixture
def other(tmp_path):
    file = tmp_path / "other.yaml"
    file.write_text(SHARP_AND_DARK)
    return file


def rows(folder, name: str = "run") -> list[dict]:
    return [json.loads(line) for line in (folder / "scores" / f"{name}.jsonl").read_text().splitlines()]


def latents(folder) -> torch.Tensor:
    return torch.cat([load_file(folder / "latents" / f"{part}.safetensors")["x0"] for part in range(2)])


def test_the_samples_are_those_of_sample(trained, rollouts):
    """Sample number i has the noise of seed + i, for any batch; each prompt has three samples."""
    one = load_role(str(trained), "student", None, ALONE, causal=True)
    asked = [prompt for prompt in TWO_PROMPTS for _ in range(3)]
    expected = torch.cat(list(videos(one, Request.of(asked), 5, 6)))
    torch.testing.assert_close(tiny_codec().decode(latents(rollouts)), expected, rtol=1e-4, atol=1e-4)
    assert [(row["prompt"], row["prompt_id"], row["seed"]) for row in rows(rollouts)] == [
        (prompt, i // 3, 5 + i) for i, prompt in enumerate(asked)
    ]
    assert sorted(path.name for path in (rollouts / "videos").iterdir()) == ["0.mp4"]


def test_a_row_holds_the_place_of_its_latents_and_their_scores(rollouts):
    """The scores are of the run's own reward: HPSv3 and twice the saturation of the first frame."""
    x0 = latents(rollouts)
    assert [(row["latents"], row["row"]) for row in rows(rollouts)[3:5]] == [
        ("latents/0.safetensors", 3),
        ("latents/1.safetensors", 0),
    ]
    saturations = pixels.saturation(tiny_codec().decode(x0[:, :, :1])).tolist()
    for row, saturation in zip(rows(rollouts), saturations, strict=True):
        assert row["parts"]["saturation"] == pytest.approx(saturation, rel=1e-4)
        assert row["reward"] == pytest.approx(row["parts"]["hpsv3"] + 2 * row["parts"]["saturation"])
    assert len({row["reward"] for row in rows(rollouts)}) == 6


def test_it_continues_where_it_ended(trained, rollouts, tmp_path, capsys):
    """A missing part and an incomplete row are written again; other files are not touched."""
    whole, folder = files_of(rollouts), copy_of(rollouts, tmp_path / "out")
    (folder / "latents" / "1.safetensors").unlink()
    table = folder / "scores" / "run.jsonl"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:5])[:-9])
    kept = (folder / "latents" / "0.safetensors").stat().st_mtime_ns
    assert main(["rollout", str(trained), *ASKED, "--output", str(folder), "--num-videos", "1"]) == 0
    assert "6 samples" in (out := capsys.readouterr().out) and "2 of them new" in out
    assert files_of(folder) == whole
    assert (folder / "latents" / "0.safetensors").stat().st_mtime_ns == kept


def test_a_complete_folder_is_not_changed(trained, rollouts, capsys):
    before = files_of(rollouts)
    assert main(["rollout", str(trained), *ASKED, "--output", str(rollouts), "--num-videos", "1"]) == 0
    assert "0 of them new" in capsys.readouterr().out and files_of(rollouts) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "6"], "holds other rollouts: their seed is 5, now 6; choose another folder"),
        (["--num-samples", "2"], "their num_samples is 3, now 2"),
        (["--batch", "2"], "their batch is 4, now 2"),
        (["--prompts", "another"], "their prompts is"),
        (["--batch", "0"], "--batch must be from 1 to 1000000, not 0"),
    ],
)
def test_other_rollouts_are_not_overwritten(trained, rollouts, capsys, options, message):
    before = files_of(rollouts)
    assert message in refused(capsys, "rollout", trained, *ASKED, "--output", rollouts, *options)
    assert files_of(rollouts) == before


def test_a_folder_of_something_else_is_not_written_into(trained, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("notes")
    message = refused(capsys, "rollout", trained, *ASKED, "--output", tmp_path)
    assert "exists and is no folder of rollouts" in message and [*files_of(tmp_path)] == ["notes.txt"]


def test_another_reward_for_the_same_samples(rollouts, other, tmp_path, capsys):
    """The reward is 10 sharpness - 2 dark_share of the first frame, motion_energy is held out, and no sample is new."""
    folder = copy_of(rollouts, tmp_path / "out")
    before = files_of(folder)
    assert main(["score", str(folder), "--reward", str(other), "--name", "sharp"]) == 0
    assert "6 samples" in capsys.readouterr().out
    video = tiny_codec().decode(latents(folder))
    first = video[:, :, :1]
    expected = 10 * pixels.sharpness(first) - 2 * pixels.dark_share(first)
    found = rows(folder, "sharp")
    assert [row["reward"] for row in found] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)
    motion = [row["parts"]["motion_energy"] for row in found]
    assert motion == pytest.approx(pixels.motion_energy(video).tolist(), rel=1e-3)
    after = files_of(folder)
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before.keys()) == ["scores/sharp.json", "scores/sharp.jsonl"]


def test_scores_of_another_reward_are_not_overwritten(rollouts, other, tmp_path, capsys):
    folder = copy_of(rollouts, tmp_path / "out")
    before = files_of(folder)
    message = refused(capsys, "score", folder, "--reward", other, "--name", "run")
    assert "run.json: the scores run are of another reward;" in message and files_of(folder) == before


def test_scores_of_an_earlier_version_are_continued(rollouts, other, tmp_path):
    """Its file of the reward lacks later settings; those that change no score may differ."""
    folder = copy_of(rollouts, tmp_path / "out")
    words = ["score", str(folder), "--reward", str(other), "--name", "sharp"]
    assert main(words) == 0
    settings = folder / "scores" / "sharp.json"
    saved = json.loads(settings.read_text())
    del saved["timeout"], saved["scorers"]["motion_energy"]["python"]
    settings.write_text(json.dumps(saved | {"retries": 3}))
    before = files_of(folder)
    assert main(words) == 0 and files_of(folder) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3", "must hold a section reward"),
        ("reward: {path: tiny, weight: 0}", "every scorer has weight 0"),
        ("reward: {weight: 0}", "names no scorer: set path, kind or scorers"),
        ("reward: {scorers: {motion_smoothness: {weight: 1}}}", "motion_smoothness needs at least 3 frames"),
    ],
)
def test_a_wrong_reward_scores_nothing(rollouts, tmp_path, capsys, text, message):
    folder = copy_of(rollouts, tmp_path / "out")
    before = files_of(folder)
    (tmp_path / "bad.yaml").write_text(text)
    assert message in refused(capsys, "score", folder, "--reward", tmp_path / "bad.yaml", "--name", "x")
    assert files_of(folder) == before


def test_a_folder_without_rollouts_is_refused(tmp_path, other, capsys):
    assert "rollout.json is missing" in refused(capsys, "score", tmp_path, "--reward", other, "--name", "x")


@pytest.mark.parametrize("place", [0.2, 0.5, 0.999])
def test_one_bit_of_the_latents_counts(rollouts, tmp_path, place):
    """Anywhere in the data."""
    folder = RolloutFolder.read(copy_of(rollouts, tmp_path / "out"))
    file = folder.file(1)
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + int(place * (len(data) - header))] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"1\.safetensors is damaged \(its checksum is wrong\): remove it and call"):
        folder.latents(1)


def test_latents_of_an_earlier_version_have_no_checksum(rollouts, tmp_path):
    folder = RolloutFolder.read(copy_of(rollouts, tmp_path / "out"))
    x0 = folder.latents(0)
    save_file({"x0": x0}, folder.file(0))
    assert torch.equal(folder.latents(0), x0)


@pytest.mark.parametrize("name", ["rollout.json.tmp", "run.jsonl", "0.mp4"])
def test_a_full_disk_is_one_error(trained, tmp_path, monkeypatch, capsys, name):
    fill_disk(monkeypatch, name)
    said = refused(capsys, "rollout", trained, *ASKED[:2], "--output", tmp_path / "out", "--num-videos", "1")
    assert said.startswith(f"error: no space to write {tmp_path / 'out'}") and "Traceback" not in said
