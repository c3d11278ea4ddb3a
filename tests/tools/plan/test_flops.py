"""FLOPs in closed form agree with the meter, which agrees with torch's own counter, and with numbers counted once."""

import pytest
import torch
from helpers import small_batch, small_model, trainable

from unified_trainer.parallel.meter import Meter
from unified_trainer.tools.plan.flops import TransformerSize, pass_flops

WAN_1_3B = TransformerSize(1536, 30, 8960)
WAN_14B = TransformerSize(5120, 40, 13824)


def test_parameters_are_those_of_the_published_networks():
    assert WAN_1_3B.parameters == 1_418_996_800
    assert WAN_14B.parameters == 14_288_491_584


@pytest.mark.parametrize(
    ("tokens", "forward", "backward"),
    [(5460, 19.821e12, 42.639e12), (32760, 283.002e12, 666.444e12)],
    ids=["240x416x53", "480x832x81"],
)
def test_a_pass_of_wan_takes_what_torch_counted(tokens, forward, backward):
    """FlopCounterMode counts the scores of attention again, and leaves out gradients of the network's inputs."""
    found = pass_flops(WAN_1_3B, tokens)
    inputs = 128 * tokens * 1536 + 512 * 1536 + 8192 * 512 * 1536
    assert found.forward == pytest.approx(forward, rel=5e-5)
    assert found.backward + found.flash - inputs == pytest.approx(backward, rel=5e-5)


def test_recomputing_all_blocks_takes_their_forward_pass():
    found = pass_flops(WAN_1_3B, 32760, repeated=1)
    assert found.recompute / found.executed == pytest.approx(0.23, abs=0.01)
    assert found.executed - pass_flops(WAN_1_3B, 32760).executed == found.recompute
    assert 0.98 * found.forward < found.recompute < found.forward


def test_the_meter_counts_the_same():
    role, batch = trainable(), small_batch(4)
    size = TransformerSize.of(small_model().network.config)
    x_t = torch.randn(4, *batch.latent_shape)
    tokens = x_t[0, 0].numel() // size.patch
    meter = Meter(torch.device("cpu"))
    with meter.measure():
        role.velocity(x_t, torch.full((4,), 0.5), batch.cond).square().mean().backward()
    assert size.parameters == role.parameters
    assert meter.flops == 4 * pass_flops(size, tokens, batch.cond["text"].shape[1]).trained


def test_an_adapter_halves_the_backward_pass_of_the_matrices():
    plain, adapted = pass_flops(WAN_14B, 32760), pass_flops(WAN_14B, 32760, rank=64)
    of_adapter = adapted.forward - plain.forward
    assert 2 * adapted.backward - plain.backward == pytest.approx(2 * plain.attention + 4 * of_adapter)
    assert WAN_14B.adapter(64) == 306_708_480
