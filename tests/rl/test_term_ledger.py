"""The ledger of a loss's terms on a network, against autograd by hand, and the factor that holds a ratio."""

import math

import pytest
import torch
from helpers import ALONE, adapted, small_batch, trainable

from unified_trainer.errors import UserError
from unified_trainer.numerics.term_gradients import balanced_factor, gradient_cosines, gradient_norm
from unified_trainer.rl.term_ledger import LedgerConfig, TermLedger
from unified_trainer.roles.gradient_products import gradient_products
from unified_trainer.roles.role import Trainable, TrainableConfig

WEIGHTS = {"matching": 0.5, "surrogate": 2.0, "reward_gradient": 0.0}


def role_and_losses(*, shared: bool = False):
    """A role and three losses of its velocities, each in two passes, the third one without a gradient."""
    student = Trainable("student", adapted(), TrainableConfig()) if shared else trainable()
    batch, draw = small_batch(2), torch.Generator().manual_seed(3)
    x_t, target = (torch.randn(2, *batch.latent_shape, generator=draw) for _ in range(2))

    def one(sigma: float, power: int):
        velocity = student.velocity(x_t, torch.full((2,), sigma, dtype=torch.float64), batch.cond)
        return (velocity - target).abs().pow(power).mean()

    losses = [[lambda s=s, p=p: one(s, p) for s in (0.3, 0.8)] for p in (1, 2)]
    return student, [*losses, [lambda: 0.0 * one(0.5, 2)]]


@pytest.mark.parametrize("shared", [False, True])
def test_products_are_those_of_autograd_by_hand(shared):
    """On all weights, or on those of the student's adapter alone; nothing is left behind."""
    student, losses = role_and_losses(shared=shared)
    found = gradient_products(student, losses, ALONE)
    flat = []
    for passes in losses:
        parts = torch.autograd.grad(sum(one() for one in passes), [*student.weights.values()], allow_unused=True)
        pairs = zip(student.weights.values(), parts, strict=True)
        flat.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs]).double())
    expected = torch.stack([torch.stack([one @ other for other in flat]) for one in flat])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)
    assert all(p.grad is None for p in student.weights.values())
    assert 0.05 < abs(float(gradient_cosines(found)[0, 1])) < 0.999


def test_norms_and_cosines_of_known_gradients():
    """g = (3, 0), (4, 4), 0: |2 g1 - g2| = |(2, -4)|, cos = 1 / sqrt(2); a zero gradient has no angle."""
    gradients = torch.tensor([[3.0, 0.0], [4.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    products = gradients @ gradients.T
    assert gradient_norm(products, torch.tensor([2.0, -1.0, 7.0]).double()) == pytest.approx(math.sqrt(20))
    cosines = gradient_cosines(products)
    assert float(cosines[0, 1]) == pytest.approx(math.sqrt(0.5)) and cosines[2].tolist() == [0.0, 0.0, 0.0]


def test_a_measurement_amid_an_update_is_an_error():
    student, losses = role_and_losses()
    student.backward(losses[0][0](), last=True)
    with pytest.raises(RuntimeError, match="before the passes of an update"):
        gradient_products(student, losses, ALONE)


def test_the_factor_follows_the_ratio_within_its_bounds():
    assert balanced_factor(1.0, 4.0, 1.0, 0.5, (1e-3, 1e3)) == 0.5
    assert balanced_factor(2.0, 0.5, 1.0, 1.0, (1e-3, 1e3)) == 4.0
    assert balanced_factor(2.0, 0.5, 1.0, 1.0, (1e-3, 3.0)) == 3.0
    assert balanced_factor(2.0, 9.0, 1.0, 1.0, (0.5, 3.0)) == 0.5
    assert [balanced_factor(2.0, bad, 1.0, 1.0, (1e-3, 1e3)) for bad in (0.0, math.inf, math.nan)] == [2.0] * 3


def ledger(**changes) -> tuple[TermLedger, dict[str, list]]:
    student, losses = role_and_losses()
    config = LedgerConfig(**{"every": 2} | changes)
    return TermLedger(config, WEIGHTS, student), dict(zip(WEIGHTS, losses, strict=True))


def test_metrics_are_of_the_weighted_terms_in_every_nth_update():
    one, passes = ledger()
    assert one.measure(1, WEIGHTS, passes.get, ALONE) == {}
    products = gradient_products(one.role, [passes["matching"], passes["surrogate"]], ALONE)
    metrics = one.measure(2, WEIGHTS, passes.get, ALONE)
    norms = {
        name: weight * math.sqrt(float(products[i, i])) for i, (name, weight) in enumerate(WEIGHTS.items()) if weight
    }
    expected = {f"term_norm/{name}": norm for name, norm in norms.items()}
    expected["term_cosine/matching-surrogate"] = float(gradient_cosines(products)[0, 1])
    expected["reward_to_matching_norm"] = norms["surrogate"] / norms["matching"]
    assert metrics == pytest.approx(expected)


def test_the_factor_reaches_the_ratio_and_is_kept():
    """At rate 1 in one measurement, at rate .5 the square root of what is missing; a ramp does not move it."""
    one, passes = ledger(ratio=0.25, rate=1.0)
    metrics = one.measure(0, WEIGHTS, passes.get, ALONE)
    assert metrics["reward_to_matching_norm"] == pytest.approx(0.25) and metrics["reward_factor"] == one.factor
    half, passes = ledger(ratio=0.25)
    half.measure(0, WEIGHTS | {"surrogate": 0.02}, passes.get, ALONE)
    assert half.factor == pytest.approx(math.sqrt(one.factor))
    other, _ = ledger(ratio=0.25)
    other.load_state_dict(half.state_dict())
    assert other.factor == half.factor and other.scaled(WEIGHTS)["surrogate"] == 2.0 * half.factor
    assert other.scaled(WEIGHTS)["matching"] == WEIGHTS["matching"]


def test_an_update_without_reward_samples_leaves_the_factor():
    one, passes = ledger(ratio=0.25, rate=1.0)
    metrics = one.measure(0, WEIGHTS, {"matching": passes["matching"], "surrogate": []}.get, ALONE)
    assert one.factor == 1.0 and "reward_to_matching_norm" not in metrics and "term_norm/matching" in metrics
    assert one.measure(0, dict.fromkeys(WEIGHTS, 0.0), passes.get, ALONE) == {}
    assert ledger()[0].state_dict() == {}


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({"every": 0}, {}, r"ledger\.every above 0"),
        ({"factor_range": (2.0, 2.0)}, {}, "must rise"),
        ({}, {"matching": 0.0}, r"needs algorithm\.matching\.weight"),
        ({}, {"surrogate": 0.0}, "balances the two"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, weights, message):
    config = LedgerConfig(**{"every": 2, "ratio": 0.5} | changes)
    with pytest.raises(UserError, match=message):
        config.check("algorithm.ledger", WEIGHTS | weights)
