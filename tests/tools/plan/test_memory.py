"""The memory that plan counts: of the passes that no other pass covers, and of what stays on the card."""

import pytest

from unified_trainer.models.blueprint import frozen_config
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.meter import Pass
from unified_trainer.roles.recompute import Recompute
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan import memory, passes
from unified_trainer.tools.plan.architecture import published
from unified_trainer.tools.plan.estimate import estimate
from unified_trainer.tools.plan.memory import _largest, _largest_losses


def made(samples: int, frames: int, *, gradient: bool = False, role: str = "student") -> Pass:
    return Pass(role, gradient, samples, samples * frames, {}, ())


def test_a_pass_with_fewer_samples_or_tokens_of_the_same_network_is_left_out():
    few, many, long, other = made(2, 3), made(8, 3), made(2, 21), made(1, 3, role="teacher")
    assert _largest([few, many, long, other, made(8, 3)]) == [many, long, other]
    assert _largest([few, made(2, 3, gradient=True)]) == [few, made(2, 3, gradient=True)]


def test_a_loss_is_left_out_if_another_covers_each_of_its_passes():
    small = [made(2, 3, gradient=True), made(2, 3)]
    large = [made(8, 3, gradient=True), made(8, 3)]
    mixed = [made(1, 3, gradient=True), made(16, 3)]
    assert _largest_losses([small, large, small, mixed]) == [large, mixed]
    assert _largest_losses([small, small[:1]]) == [small, small[:1]]


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_weights_and_moments_leave_the_card_each_by_its_own_switch(moments):
    """Weights 4 bytes and gradients 4, moments 8 or 4 bytes for each trained weight, over 8 shards."""
    words = ["--recipe", "wan2.1-1.3b", "--method", "finetune", "--student.moments", moments, "--student.precision"]
    words += ["fp32", "--student.ema-decay", "0", "--algorithm.batch-size", "8"]
    switches = {"none": [], "weights": ["--parallel.offload-weights"], "moments": ["--parallel.offload-optimizer"]}
    switches["both"] = switches["weights"] + switches["moments"]
    planned = {name: estimate(parse([*words, *more]), 8) for name, more in switches.items()}
    held = {name: memory.held_networks(one.counts, one.sizes)["student", ""] for name, one in planned.items()}
    share, moment = planned["none"].parameters["student"] / 8, 4 if moments == "fp32" else 2
    kept = {name: (one.weights, one.gradients, one.moments) for name, one in held.items()}
    assert kept["none"] == pytest.approx((4 * share, 4 * share, 2 * moment * share))
    assert kept["weights"] == (0, 0, kept["none"][2]) and kept["moments"] == (*kept["none"][:2], 0)
    assert kept["both"] == (0, 0, 0)
    trained = held["none"].trained
    temporary = {name: memory._temporary(one.sizes, "student", trained) for name, one in planned.items()}
    bucket = 2**24  # no weight's shard is larger
    assert temporary["moments"] - temporary["none"] == 2 * moment * bucket
    assert temporary["weights"] - temporary["none"] == 8 * bucket and temporary["both"] == temporary["none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "gradient"),
    [
        ({"trained": True}, False),
        ({"trained": True, "recompute": Recompute.of_setting("selective", 30)}, True),
        ({"rank": 16, "recompute": Recompute.of_setting("full", 30)}, True),
    ],
    ids=["without gradient", "selective", "adapter, full"],
)
def test_one_trace_gives_the_bytes_of_every_number_of_samples(monkeypatch, network, gradient):
    """Traced over two samples, their bytes are those that a trace over eleven gives."""
    config = frozen_config(published()["Wan-AI/Wan2.1-T2V-1.3B-Diffusers"]["transformer"])
    of_1_3b = passes.Network(WanModel, config, "bf16", False, 30, **network)
    found = []
    for traced in (11, 2):
        monkeypatch.setattr(passes, "_samples", lambda _, number=traced: number)
        passes.pass_bytes.cache_clear()
        passes._trace.cache_clear()
        found.append(passes.pass_bytes(of_1_3b, (16, 2, 30, 52), 512, 2, gradient=gradient, fresh=False))
    assert found[0] == found[1]
