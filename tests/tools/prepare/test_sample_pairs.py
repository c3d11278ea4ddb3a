"""Pairs of a student's own samples: the best and the worst of each prompt, as flow_dpo reads them."""

import json

import pytest
import torch
from helpers import LATENT_SHAPE, SMALL, TWO_PROMPTS, copy_of, flags, metrics_of, refused, tiny_codec
from safetensors.torch import load_file

from unified_trainer.__main__ import main
from unified_trainer.data.parquet import ParquetPairs
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.tools.prepare.sample_pairs import best_and_worst

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Three samples of each of two prompts, whose parts of four end within a prompt, with rewards by hand."""
    root = tmp_path_factory.mktemp("rollouts")
    assert main([*SMALL["dance_grpo"], "--steps", "1", "--output", str(root / "run")]) == 0
    asked = ("--prompts", *TWO_PROMPTS, "--num-samples", "3", "--batch", "4")
    assert main(["rollout", str(root / "run"), *asked, "--output", str(root / "out")]) == 0
    write_scores(root / "out", "mine", [0.0, 2.0, -1.0, 5.0, 4.5, 4.0])
    return root / "out"


def write_scores(folder, name, rewards):
    """Scores of another name, of the samples in the folder."""
    rows = [json.loads(line) for line in (folder / "scores" / "run.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"reward": reward}) for row, reward in zip(rows, rewards, strict=False)]
    (folder / "scores" / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def read(folder):
    return read_stored_files(folder, ClipRows(LATENT_SHAPE))


def test_rows_are_the_latents_of_the_best_and_the_worst_sample(rollouts, tmp_path):
    """Samples 1 and 2 of the first prompt, 3 and 5 of the second; the text embeddings are used."""
    assert main(["preprocess", str(rollouts), str(tmp_path / "pairs"), "--pairs", "mine"]) == 0
    x0 = torch.cat([load_file(rollouts / "latents" / f"{part}.safetensors")["x0"] for part in range(2)])
    stored = [read(tmp_path / "pairs" / side) for side in ("preferred", "rejected")]
    stored[0].check_rejected(stored[1])
    source = ParquetPairs(*stored, tiny_codec(), 1)
    assert [source.request(row).text for row in range(2)] == list(TWO_PROMPTS)
    torch.testing.assert_close(source.latents([0, 1]), x0[[1, 3]])
    torch.testing.assert_close(source.rejected([0, 1]), x0[[2, 5]])
    assert torch.equal(source.condition([0, 1])["text"], tiny_codec().encode_text(TWO_PROMPTS)["text"])
    source.close()


def test_a_run_learns_from_the_pairs(rollouts, tmp_path, capsys):
    """Of two prompts one has rewards that differ enough."""
    words = ("--pairs", "mine", "--least-difference", "2")
    assert main(["preprocess", str(rollouts), str(tmp_path / "pairs"), *words]) == 0
    assert "1 pairs in" in (said := capsys.readouterr().out) and "; 1 prompts have none" in said
    small = SMALL["finetune"][2:]
    at = small.index("--data.num-clips")
    size = flags({"video.frames": 5, "video.height": 32, "video.width": 32, "algorithm.batch-size": 1})
    data = flags({"data.path": tmp_path / "pairs" / "preferred", "data.rejected": tmp_path / "pairs" / "rejected"})
    words = ["--method", "flow_dpo", *small[:at], *small[at + 2 :], *size, *data, "--output", str(tmp_path / "run")]
    assert main([*words, "--steps", "2"]) == 0
    assert [line["step"] for line in metrics_of(tmp_path / "run") if "train/preferred" in line] == [1, 2]


def test_equal_rewards_and_smaller_differences_make_no_pair():
    rewards = [(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.5), (1, -0.5), (2, 3.0), (3, 0.0), (3, 0.25)]
    rows = [{"prompt_id": prompt, "reward": reward} for prompt, reward in rewards]
    for least, expected in ((0.0, [(0.5, -0.5), (0.25, 0.0)]), (1.0, [(0.5, -0.5)])):
        assert [(best["reward"], worst["reward"]) for best, worst in best_and_worst(rows, least)] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pairs", "absent"), "has scores of 0 of 6 samples"),
        (("--pairs", "begun"), "has scores of 4 of 6 samples"),
        (("--pairs", "mine", "--least-difference", "9"), "no prompt of 2 has two samples whose rewards mine differ"),
        (("--pairs", "mine", "--captions", "a.csv"), "leave --captions and --trajectories out"),
        (("--least-difference", "1"), "add --pairs NAME"),
    ],
)
def test_what_is_refused(rollouts, tmp_path, capsys, words, message):
    write_scores(rollouts, "begun", [1.0] * 5)
    assert message in refused(capsys, "preprocess", str(rollouts), str(tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_latents_of_another_size_are_refused(rollouts, tmp_path, capsys):
    folder = copy_of(rollouts, tmp_path / "copy")
    about = json.loads((folder / "rollout.json").read_text())
    (folder / "rollout.json").write_text(json.dumps(about | {"video": about["video"] | {"frames": 9}}))
    said = refused(capsys, "preprocess", folder, tmp_path / "out", "--pairs", "mine")
    assert "holds latents of (16, 2, 2, 2), and --model has (16, 3, 2, 2)" in said
    assert not (tmp_path / "out").exists()
