"""distill_rl with its ledger: the update stays as it is, bit for bit, and the ratio of reward to matching is held."""

import dataclasses

import pytest
import torch
from helpers import ALONE, FEW_STEPS, assert_same, setup_of
from test_distill_rl import ALL, ONE, TILT, config, gradients, losses, trainer

from unified_trainer.checkpoint import dcp as checkpoint
from unified_trainer.errors import UserError
from unified_trainer.methods.distill_rl_settings import TiltConfig
from unified_trainer.rl.term_ledger import LedgerConfig

PARTS = {"update_batch": 2, "prompts_per_update": 1, "clip_low": 0.01, "clip_high": 0.01}
LEDGER = ("term_norm/", "term_cosine/", "reward_to_matching_norm")


@pytest.mark.slow
def test_the_update_is_the_same_with_and_without_the_ledger():
    """Two updates a step, in parts: two steps with a KL whose coefficient adapts, and one with exits that are drawn."""
    kl = {"kl_coefficient": 0.1, "kl_target": 1e-4, "kl_horizon": 1.0}
    for changes, more in ((ALL, kl | {"tilt": TILT}), ({"matching": ONE | {"exits": "all"}, "gradient": ONE}, {})):
        ledgers = (LedgerConfig(), LedgerConfig(every=1))
        plain, measured = (trainer(**changes, **PARTS, **more, moves=True, ledger=ledger) for ledger in ledgers)
        for step in range(2 if more else 1):
            expected, found = plain.step(step), measured.step(step)
            assert {key: value for key, value in found.items() if not key.startswith(LEDGER)} == expected
            assert sum(key.startswith("term_norm/") for key in found) == len(changes)
        assert_same(measured.tensors(), plain.tensors())


@pytest.mark.slow
def test_norms_and_cosines_are_those_of_the_terms_alone():
    metrics = trainer(**ALL, ledger=LedgerConfig(every=1)).step(0)
    flat = {}
    for name, term in ALL.items():
        one = trainer(**{name: ONE})
        losses(one, 0)
        found = gradients(one.roles["student"])
        flat[name] = term["weight"] * torch.cat([found[key].flatten() for key in sorted(found)]).double()
    flat["reward_gradient"] = flat.pop("gradient")
    for name, gradient in flat.items():
        assert metrics[f"term_norm/{name}"] == pytest.approx(float(gradient.norm()), rel=1e-4)
    for one, other in (("matching", "surrogate"), ("matching", "reward_gradient"), ("surrogate", "reward_gradient")):
        cosine = float(flat[one] @ flat[other] / flat[one].norm() / flat[other].norm())
        assert metrics[f"term_cosine/{one}-{other}"] == pytest.approx(cosine, abs=1e-4)
    reward = float((flat["surrogate"] + flat["reward_gradient"]).norm())
    assert metrics["reward_to_matching_norm"] == pytest.approx(reward / float(flat["matching"].norm()), rel=1e-4)


@pytest.mark.slow
def test_the_ratio_is_held_and_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    """Four steps of two updates, the ratio measured in every third: at rate 1 it is the one asked for."""
    given = {**ALL, **PARTS, "moves": True, "ledger": LedgerConfig(every=3, ratio=0.5, rate=1.0)}
    one, rows = trainer(**given), []
    for step in range(4):
        rows.append(one.step(step))
        if step == 1:
            checkpoint.save(tmp_path / "checkpoints", 2, one.tensors(), ALONE)
    held = [row["reward_to_matching_norm"] for row in rows if "reward_to_matching_norm" in row]
    assert held == pytest.approx([0.5] * 3, rel=1e-6)  # updates 0, 3 and 6 of 8
    assert rows[0]["reward_factor"] != 1.0 != rows[1]["reward_factor"]
    again = trainer(**given)
    assert again.resume(tmp_path) == (2, [])
    assert [again.step(step) for step in (2, 3)] == rows[2:]
    assert_same(again.tensors(), one.tensors())


def test_terms_end_at_their_steps():
    one = trainer(matching=ONE | {"end_step": 2}, surrogate=ONE, gradient=ONE | {"first_step": 1, "end_step": 2})
    seen = [{"dmd_loss", "reward_gradient_loss"} & one.step(step).keys() for step in range(3)]
    assert seen == [{"dmd_loss"}, {"dmd_loss", "reward_gradient_loss"}, set()]
    assert [TiltConfig(0.5, first_step=1, end_step=3).beta_at(step) for step in range(4)] == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"surrogate": ONE | {"first_step": 5, "end_step": 5}},
            r"algorithm\.surrogate\.end_step 5 must be above .*never",
        ),
        ({"surrogate": ONE | {"first_step": 10}}, r"algorithm\.surrogate\.first_step 10 must be below .*\(10\).*never"),
        ({"matching": ONE, "tilt": TiltConfig(0.5, first_step=12)}, r"algorithm\.tilt\.first_step 12 .*never"),
        (
            {"matching": ONE, "ledger": LedgerConfig(ratio=0.5)},
            r"algorithm\.ledger\.ratio needs algorithm\.ledger\.every",
        ),
    ],
)
def test_calendars_and_ledgers_that_never_act_are_refused(changes, message):
    setup = dataclasses.replace(setup_of(FEW_STEPS), steps=10)
    with pytest.raises(UserError, match=message):
        config(**changes).check(setup)
    config(matching=ONE, surrogate=ONE | {"first_step": 9}, gradient={"weight": 0.0, "first_step": 99}).check(setup)
