"""Attention kernels of other packages: in bf16 passes without gradient, and nowhere else.

None of them runs on a CPU: diffusers' dispatcher, which calls them, has its plain kernel in their place here.
"""

from collections.abc import Iterator

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from helpers import ALONE, CAPTIONS, CPU, LATENT_SHAPE, SMALL, gradients, small_causal, small_model, tiny_codec
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.models.wan.attention import LayerText, set_attention
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel import device
from unified_trainer.parallel.device import attention_order, use_attention
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse

CUDA = torch.device("cuda")
X_T = torch.randn(2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0))
SIGMA = torch.tensor([0.3, 0.7])


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[tuple[torch.dtype, ...]]]:
    """The dtypes of queries, keys and values of each call of the kernel, which is chosen from here on."""
    seen, kernel = [], AttentionBackendName._NATIVE_MATH
    plain = _AttentionBackendRegistry._backends[kernel]

    def counted(query, key, value, **more):
        seen.append((query.dtype, key.dtype, value.dtype))
        return plain(query, key, value, **more)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, kernel, counted)
    monkeypatch.setitem(device.OTHER_ATTENTION, "flash_3", kernel.value)
    use_attention("flash_3", CUDA)
    device._chosen_other["cpu"] = kernel.value
    yield seen
    use_attention("auto", CPU)


pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch


def velocity(role: Trainable | Frozen) -> Tensor:
    return role.velocity(X_T, SIGMA, tiny_codec().encode_text(CAPTIONS[:2]))


def teacher(precision: str) -> Frozen:
    return Frozen("teacher", Backbone(small_model(), ALONE), RoleConfig(precision=precision))


def student(precision: str = "bf16", **more: object) -> Trainable:
    return Trainable(
        "student", Backbone(small_model(), ALONE, trained=True, **more), TrainableConfig(precision=precision)
    )


def test_a_pass_in_bf16_without_gradient_takes_it(calls):
    """Self-attention and cross-attention of both blocks, all three inputs in bf16."""
    found = velocity(teacher("bf16"))
    assert calls == [(torch.bfloat16,) * 3] * 4
    use_attention("auto", CPU)
    torch.testing.assert_close(found, velocity(teacher("bf16")), rtol=0.02, atol=0.02)
    assert len(calls) == 4


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pass_with_gradient_does_not(calls, recompute):
    """Also where the backward pass computes activations again: velocity and gradients are those of torch's kernels."""
    found = []
    for _ in range(2):
        role = student(recompute=recompute)
        out = velocity(role)
        out.square().mean().backward()
        found.append((out.detach(), gradients(role.network)))
        assert not calls
        use_attention("auto", CPU)
    assert torch.equal(found[0][0], found[1][0])
    for key, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][key]), key


def test_a_pass_in_fp32_does_not(calls):
    with torch.no_grad():
        found = [velocity(teacher("fp32")), velocity(student("fp32"))]
    assert not calls
    use_attention("auto", CPU)
    assert torch.equal(found[0], velocity(teacher("fp32"))) and torch.equal(found[0], found[1])


def test_a_causal_rollout_takes_it_with_cached_keys(calls):
    """The second chunk's queries attend to both chunks' keys."""
    role = CausalStudent("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig(precision="bf16"))
    condition, chunks = tiny_codec().encode_text(CAPTIONS[:1]), ChunkConfig(chunk_frames=1)
    cache = role.open_cache(condition, condition, chunks, 1.0, SIGMA)
    with torch.no_grad():
        for frame in range(2):
            cache.velocity(X_T[:1, :, frame : frame + 1], SIGMA[0])
            cache.append(X_T[:1, :, frame : frame + 1])
    assert calls and set(calls) == {(torch.bfloat16,) * 3}


def test_one_that_is_not_installed_is_refused():
    with pytest.raises(
        UserError, match=r"^parallel\.attention sage: .*`kernels` package.*\[kernels\]'?, or leave it at auto$"
    ):
        attention_order("sage", CUDA)


def test_every_kernel_is_one_of_diffusers():
    known = _AttentionBackendRegistry._backends
    assert all(AttentionBackendName(name) in known for name in device.OTHER_ATTENTION.values())


def test_a_policy_is_not_sampled_with_8_bits():
    run = parse([*SMALL["dance_grpo"], "--parallel.attention", "sage"])
    with pytest.raises(
        UserError, match=r"parallel\.attention sage rounds to 8 bits in the rollout and not in the update"
    ):
        check(run, ALONE)


def test_the_tokens_of_an_image_have_an_attention_of_their_own():
    """Wan2.1 I2V: CLIP's tokens stand before the 512 of the text; with and without a cache of keys and values."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "num_layers": 2}
    sizes |= {"patch_size": (1, 1, 1), "text_dim": 32, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 16}
    network = WanTransformer3DModel(**sizes, image_dim=20, added_kv_proj_dim=24).eval()
    inputs = {"hidden_states": torch.randn(2, 16, 2, 2, 2), "timestep": torch.tensor([300, 700])}
    inputs |= {"encoder_hidden_states": torch.randn(2, 512, 32)}
    inputs |= {"encoder_hidden_states_image": torch.randn(2, 257, 20)}
    with torch.no_grad():
        expected = network(**inputs).sample
        set_attention(network.blocks)
        torch.testing.assert_close(network(**inputs).sample, expected, rtol=0, atol=2e-6)
        without = network(**inputs | {"encoder_hidden_states_image": torch.zeros(2, 257, 20)}).sample
    assert float((without - expected).abs().max()) > 0.01
    attn, x, tokens = network.blocks[0].attn2, torch.randn(2, 8, 24), torch.randn(2, 257 + 512, 24)
    text = LayerText(tokens, [])
    first = attn(x, text)
    assert len(text.cached) == 2 and torch.equal(attn(x, text), first) and torch.equal(attn(x, tokens), first)
