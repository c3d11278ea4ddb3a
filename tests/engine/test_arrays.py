"""Samples and weights as they travel between processes."""

import pytest
import torch

from unified_trainer.engine import arrays
from unified_trainer.roles.reward import Scores
from unified_trainer.types import Rollout

CPU = torch.device("cpu")


def weights() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).view(2, 3).t(),  # not contiguous
        "b": torch.tensor([1e-3, float("inf")], dtype=torch.bfloat16),
        "c": torch.tensor(7),
    }


def test_weights_arrive_bit_for_bit():
    there = {name: torch.zeros_like(weight) for name, weight in weights().items()}
    arrays.Weights(3, weights()).copy_to(there)
    for name, weight in weights().items():
        assert torch.equal(there[name], weight)


def test_weights_may_travel_in_half_of_the_bytes():
    """float32 weights are rounded to bfloat16, others are as they were; the receiver's dtypes are the trained ones."""
    single = {"a": torch.linspace(0, 1, 100), "b": torch.ones(4, dtype=torch.float64) / 3, "c": torch.tensor(7)}
    whole, half = arrays.Weights(3, single), arrays.Weights(3, single, half=True)
    there = {name: torch.zeros_like(weight) for name, weight in single.items()}
    half.copy_to(there)
    assert torch.equal(there["a"], single["a"].bfloat16().float()) and not torch.equal(there["a"], single["a"])
    assert torch.equal(there["b"], single["b"]) and torch.equal(there["c"], single["c"])
    assert arrays.size(whole._bytes) - arrays.size(half._bytes) == 200


def test_a_changed_byte_is_refused_and_changes_no_weight():
    sent = arrays.Weights(3, weights())
    sent._bytes["a"] = sent._bytes["a"].copy()
    sent._bytes["a"][5] ^= 1
    there = {name: torch.zeros_like(weight) for name, weight in weights().items()}
    with pytest.raises(RuntimeError, match="weights of version 3 were damaged"):
        sent.copy_to(there)
    assert not any(bool(weight.any()) for weight in there.values())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("a", torch.zeros(2, 3)),
        ("b", torch.zeros(2)),
        ("c", torch.tensor([7])),
    ],
)
def test_weights_of_another_model_are_refused(name, other):
    with pytest.raises(RuntimeError, match=f"holds other weights than are trained: .*'{name}'"):
        arrays.Weights(0, weights()).copy_to(weights() | {name: other})
    fewer = {key: weight for key, weight in weights().items() if key != "c"}
    with pytest.raises(RuntimeError, match="other weights than are trained: 2 there, 3 here"):
        arrays.Weights(0, weights()).copy_to(fewer)


def test_samples_arrive_as_they_were_made():
    x0 = torch.randn(2, 16, 2, 2, 2)
    rollout = Rollout(torch.randn(2, 3, 16, 2, 2, 2), torch.randn(2, 2, dtype=torch.float64), x0, x0[:, None][:, :0])
    scores = Scores(torch.randn(2, 1), {"mean": torch.randn(2)}, torch.randn(2, 4))
    for made, there in (
        (rollout, arrays.to_rollout(arrays.of_rollout(rollout), CPU)),
        (scores, arrays.to_scores(arrays.of_scores(scores), CPU)),
    ):
        for name, value in vars(made).items():
            other = getattr(there, name)
            pairs = [(value[key], other[key]) for key in value] if isinstance(value, dict) else [(value, other)]
            assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in pairs)
