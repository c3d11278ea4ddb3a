"""The norms of queries and keys: the written-out formula, with one rounding, under any autocast."""

import pytest
import torch
from helpers import small_model
from torch import Tensor, nn

from unified_trainer.models.wan import attention


def drawn() -> tuple[nn.RMSNorm, Tensor]:
    torch.manual_seed(0)
    norm = nn.RMSNorm(24, eps=1e-6)
    nn.init.normal_(norm.weight)
    return norm, torch.randn(2, 5, 24).bfloat16()


def test_the_norm_is_the_formula_in_float32():
    """x / sqrt(mean x^2 + eps) weight of x in bf16, computed and returned in float32."""
    norm, x = drawn()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = attention.normed(norm, x)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)  # bf16 is 4e-3


@pytest.mark.parametrize("gradient", [False, True])
def test_every_query_and_key_of_wan_is_normalised_so(gradient):
    """Torch warns of a norm with a bf16 input and a float32 weight, which is several kernels; here that is an error."""
    model = small_model()
    x, text = torch.randn(1, 16, 2, 2, 2), torch.randn(1, 4, 32)
    with torch.set_grad_enabled(gradient), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        model.network(x, torch.tensor([500.0]), text)
