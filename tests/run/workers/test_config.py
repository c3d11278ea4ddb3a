"""Settings of Ray and of workers that cannot be are refused before any weight is read."""

import sys
from dataclasses import replace

import pytest
from helpers import ALONE, SMALL, flags

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.versions import install
from unified_trainer.run.build_worker import build_sampling
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.workers import check_transport

pytestmark = pytest.mark.slow  # seconds together

GRPO = SMALL["dance_grpo"]
REPLICA = [*flags({"rollouts.workers": 1, "rollouts.reward-workers": 1, "rollouts.ranks": 3})]
BESIDE = ["--rollouts.evaluation-workers", "1", "--validate-every", "2", "--student.ema-decay", "0.5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollouts.ahead", "1"], "rollouts.ahead needs rollouts.workers above 0"),
        (["--rollouts.reward-workers", "1"], "rollouts.reward_workers needs rollouts.workers above 0"),
        (["--rollouts.transport", "nixl"], "nixl needs rollouts.workers or rollouts.evaluation_workers above 0"),
        (["--rollouts.evaluation-workers", "1"], "rollouts.evaluation_workers has nothing to validate"),
        (["--rollouts.evaluation-lag", "1"], "rollouts.evaluation_lag needs rollouts.evaluation_workers above 0"),
        ([*BESIDE, "--rollouts.evaluation-lag", "3"], "must be at most validate_every (2)"),
        ([*BESIDE, "--hacking-monitor.action", "roll_back"], "cannot recall samples that workers have begun"),
        (["--rollouts.workers", "1", "--rollouts.ranks", "2"], "rollouts.ranks above 1 needs rollouts.reward_workers"),
        (["--rollouts.reward-workers", "1", "--rollouts.ranks", "2"], "reward_workers needs rollouts.workers above 0"),
        (
            [*REPLICA, "--rollouts.gpus", "0.5"],
            "rollouts.gpus must be 1 with rollouts.ranks 3, or 0 for the CPU, not 0.5",
        ),
        (REPLICA, "rollouts.ranks (3) must divide the 4 attention heads of student.path"),
        (["--launcher", "ray", "--ray.ranks", "0"], "ray.ranks must be from 1 to 1000000, not 0"),
    ],
)
def test_settings_that_cannot_be(tmp_path, capsys, words, message):
    assert main([*GRPO, "--output", str(tmp_path / "run"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["dmd2", "self_forcing", "reward_gradient", "finetune"])
def test_methods_that_train_through_their_samples_take_none(tmp_path, capsys, method):
    words = ["--method", method, "--recipe", "tiny", "--rollouts.workers", "1", "--output", str(tmp_path / "run")]
    assert main(words) == 2
    assert f"rollouts.workers must be 0 for {method}" in capsys.readouterr().err


def test_without_ray_installed_the_error_says_how(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*GRPO, "--output", str(tmp_path / "run"), "--rollouts.workers", "1"]) == 2
    assert f"rollouts.workers needs Ray: {install('ray')}" in capsys.readouterr().err


def test_a_transport_that_cannot_be_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)  # not installed
    words = ["--rollouts.workers", "1", "--rollouts.transport", "nixl", "--output", str(tmp_path / "run")]
    assert main([*GRPO, *words]) == 2
    said = capsys.readouterr().err
    assert "rollouts.transport nixl needs NIXL (" in said and install("ray-direct") in said
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="not of an NPU: set"):
        check_transport("nixl", "npu")
    check_transport("object_store", "npu")


WEIGHTS = 743_920  # of the tiny transformer
BF16 = ["--student.precision", "bf16"]


ADAPTER = [*BF16, "--student.adapter.rank", "2"]


@pytest.mark.parametrize(("words", "ranks", "size"), [([], 1, 4), ([], 2, 2), (BF16, 1, 2), (ADAPTER, 1, 2)])
def test_a_model_that_does_not_fit_a_device_is_refused(monkeypatch, words, ranks, size):
    """Weights take the bytes of the precision of passes; the ranks of a worker share them."""
    needed = []

    def none_is_free(bytes_needed, _device, what, way_out):
        needed.append(bytes_needed)
        raise UserError(f"{what}: {way_out}")

    monkeypatch.setattr("unified_trainer.run.build_worker.require_memory", none_is_free)
    with pytest.raises(UserError, match=r"the model of a rollout worker: .*--rollouts\.workers 0"):
        build_sampling(parse([*GRPO, *words]), replace(ALONE, size=ranks), True, False)
    assert needed == [size * WEIGHTS]
