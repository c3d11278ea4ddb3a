"""FLOPs of sizes agree with the meter, which agrees with torch's own counter, and with numbers counted once."""

import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers import small_batch, small_model, trainable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.models.blueprint import frozen_config
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.meter import Meter
from unified_trainer.tools.plan.architecture import published
from unified_trainer.tools.plan.flops import pass_flops as flops_of
from unified_trainer.tools.plan.network_size import measured, plain_pass, size_of, with_layers
from unified_trainer.tools.plan.passes import Network, decode_flops, role_of
from unified_trainer.tools.plan.tracing import quiet_norms

OF_1_3B, OF_14B = (
    frozen_config(published()[f"Wan-AI/Wan2.1-T2V-{size}-Diffusers"]["transformer"]) for size in ("1.3B", "14B")
)
WAN_1_3B, WAN_14B = (size_of(WanModel, config) for config in (OF_1_3B, OF_14B))
SHAPES = {5460: (16, 14, 30, 52), 32760: (16, 21, 60, 104)}  # by tokens


def pass_flops(config, tokens: int, **options):
    return flops_of(size_of(WanModel, config), plain_pass(WanModel, config, SHAPES[tokens], 512), **options)


def test_parameters_are_those_of_the_published_networks():
    assert WAN_1_3B.parameters == 1_418_996_800
    assert WAN_14B.parameters == 14_288_491_584


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "forward", "backward"),
    [(5460, 19.821e12, 42.639e12), (32760, 283.002e12, 666.444e12)],
    ids=["240x416x53", "480x832x81"],
)
def test_a_pass_of_wan_takes_what_torch_counted(tokens, forward, backward):
    """FlopCounterMode counts the scores of attention again, and leaves out gradients of the network's inputs."""
    found = pass_flops(OF_1_3B, tokens)
    inputs = 128 * tokens * 1536 + 512 * 1536 + 8192 * 512 * 1536
    assert found.forward == pytest.approx(forward, rel=5e-5)
    assert found.backward + found.flash - inputs == pytest.approx(backward, rel=5e-5)


@pytest.mark.slow
def test_recomputing_all_blocks_takes_their_forward_pass():
    found = pass_flops(OF_1_3B, 32760, repeated=1)
    assert found.recompute / found.executed == pytest.approx(0.23, abs=0.01)
    assert found.executed - pass_flops(OF_1_3B, 32760).executed == found.recompute
    assert 0.98 * found.forward < found.recompute < found.forward


def test_the_meter_counts_the_same():
    role, batch = trainable(), small_batch(4)
    size = measured(small_model())
    x_t = torch.randn(4, *batch.latent_shape)
    meter = Meter(torch.device("cpu"))
    with meter.measure():
        role.velocity(x_t, torch.full((4,), 0.5), batch.cond).square().mean().backward()
    assert size.parameters == role.parameters
    config, rows = frozen_config(dict(role.network.config)), batch.cond["text"].shape[1]
    assert meter.flops == 4 * flops_of(size, plain_pass(WanModel, config, batch.latent_shape, rows)).trained


@pytest.mark.slow
def test_an_adapter_halves_the_backward_pass_of_the_matrices():
    plain, adapted = pass_flops(OF_14B, 32760), pass_flops(OF_14B, 32760, rank=64)
    of_adapter = adapted.forward - plain.forward
    assert 2 * adapted.backward - plain.backward == pytest.approx(2 * plain.attention + 4 * of_adapter)
    assert WAN_14B.adapter(64) == 306_708_480


WITHOUT = {"mm", "addmm", "bmm", "convolution", "empty_like", "device"}  # products, and what moves nothing


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, but products, attention and views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        result = call(*args, **(kwargs or {}))
        name = call._schema.name.rpartition(":")[2]
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in call._schema.returns)
        if not is_view and name not in WITHOUT and "attention" not in name:
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
            self.bytes += sum(one.numel() * one.element_size() for one in tensors)
        return result


def counted(layers: int) -> tuple[int, int]:
    """Bytes of the forward and of the backward pass of Wan2.1-1.3B with this many blocks over 5460 tokens."""
    network = Network(WanModel, OF_1_3B, "bf16", False, layers, trained=True)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    role = role_of(network, range(layers), fake)
    with fake, quiet_norms():
        x = role.backbones[""].model.example(SHAPES[5460], 1, 512)
        with Traffic() as forward:
            velocity = role.velocity(*x)
        with Traffic() as backward:
            velocity.square().mean().backward()
    return forward.bytes, backward.bytes


@pytest.mark.slow
def test_traffic_of_a_block_is_what_its_operations_read_and_write():
    """The second block of 1.3B over 5460 tokens; rounding its weights, 6 bytes each, is no traffic of tokens."""
    few, more = counted(1), counted(2)
    forward, backward = (b - a for a, b in zip(few, more, strict=True))
    forward -= 6 * max(WAN_1_3B.blocks)
    found = pass_flops(with_layers(OF_1_3B, 1), 5460)
    assert forward == pytest.approx(found.traffic, rel=0.05)
    assert backward == pytest.approx(found.traffic_back, rel=0.15)


@pytest.mark.slow
def test_traffic_of_a_pass_at_both_sizes():
    """353 x 1536 + 4 x 8960 bytes a token and block; fused blocks read and write a sixth of that."""
    for tokens, gigabytes in ((5460, 94.7), (32760, 568.1)):
        assert pass_flops(OF_1_3B, tokens).traffic == pytest.approx(1e9 * gigabytes, rel=1e-3)
        fused = pass_flops(OF_1_3B, tokens, fused=True)
        assert fused.traffic < pass_flops(OF_1_3B, tokens).traffic / 5
        assert fused.traffic_back == pytest.approx(2.6 * fused.traffic)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"])
def test_decoding_takes_what_torch_counts(name):
    """From the third latent frame on, each takes as many FLOPs: only four are counted."""
    config = published()[name]["vae"]
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(config)
        latents = torch.zeros(1, config.get("z_dim", 16), 6, 8, 8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        vae.decode(latents)
    assert counter.get_total_flops() == decode_flops(
        WanCodec, frozen_config(config), tuple(latents.shape[1:]), half=True
    )
