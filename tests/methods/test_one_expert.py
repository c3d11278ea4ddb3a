"""One of two experts is trained: each step of every method moves it, and no weight of the other one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cells import cells
from helpers import ALONE, setup_of

from unified_trainer.basics.errors import UserError
from unified_trainer.methods import METHODS
from unified_trainer.numerics.flow import ShiftedGrid, ShiftedUniform, law_on_side
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.experts import ExpertConfig, ExpertLayout
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.plan import check_method
from unified_trainer.run.plan.roles import plan_roles
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan import rehearsal

BOUNDARY = 0.9  # of the levels 1, .9375, .8333 and .625 of four steps of shift 5, two are high
SAMPLER = ("--sampler.num-steps", "4", "--sampler.shift", "5", "--validate-every", "0")
MATCHING = "exits at calls of the trained expert; tau of the student and of the critic by the critic's trained experts"
FORWARD = "noise levels of the sampler that the trained expert has"
POLICY = "transitions that the trained expert makes"
# What each method does with the noise levels of a student that trains one expert, the networks that a step then does
# not run, and why an expert cannot be trained alone.
LEVELS = {
    "finetune": "by its law given the side, also for each chunk",
    "flow_dpo": "by its law given the side",
    "flow_map": "by its law given the side, as all of a step lies below the boundary",
    "ode_init": "those levels of the student that the trained expert has",
    "consistency": "those levels of the teacher that the trained expert has; the step's end may be the other's",
    "dmd2": MATCHING,
    "rcm": f"as consistency, and {MATCHING}",
    "self_forcing": MATCHING,
    "long_self_forcing": MATCHING,
    "streaming_tuning": MATCHING,
    "distill_rl": f"{POLICY}; the terms of x0 need the sampler's last level",
    "dance_grpo": POLICY,
    "dance_ppo": f"{POLICY}; the value function needs all levels of the window",
    "diffusion_nft": FORWARD,
    "awm": FORWARD,
    "crd": FORWARD,
    "online_dpo": FORWARD,
    "reward_gradient": "those of the last calls that the trained expert has",
}
IDLE = {"finetune": "high low", "flow_dpo": "high low", "ode_init": "high low", "flow_map": "low", "consistency": "low"}
IDLE |= dict.fromkeys(("dmd2", "self_forcing", "long_self_forcing", "streaming_tuning", "reward_gradient"), "high")
SETTINGS = {"reward_gradient": ("--algorithm.last-calls", "4")}
SETTINGS |= {name: ("--algorithm.student-every", "1") for name in METHODS if "tau" in LEVELS[name]}
REFUSED = {
    ("flow_map", "student", "high"): "student.low.trained must be True",
    ("distill_rl", "student", "high"): "the last step of the sampler lies wholly in the expert of student that is not",
    ("dance_ppo", "value", "high"): "algorithm.window lies wholly in the expert of value that is not trained",
    ("dance_ppo", "value", "low"): "algorithm.window lies wholly in the expert of value that is not trained",
}
CELLS = [
    (name, role, side, ())
    for name in METHODS
    for role, spec in method_named(name).roles.items()
    if issubclass(spec.kind, Trainable)
    for side in (("high",) if role == "critic" else ("high", "low"))
]
STAYS = ExpertConfig(trained=False)
CAUSAL = ("--sampler.chunks.chunk-frames", "1")
CELLS += [("finetune", "student", side, (*CAUSAL, "--algorithm.forcing", "teacher")) for side in ("high", "low")]
CELLS += [(name, "student", "low", CAUSAL) for name in ("ode_init", "consistency")]
CELLS += [("dmd2", "student", "low", ("--algorithm.rollout", "data"))]
CELLS += [("dmd2", "critic", "low", ("--algorithm.direction", "decoupled"))]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A pipeline of two transformers of one block."""
    return Path(rehearsal._folder(0, BOUNDARY))


def built(folder: Path, method: str, *flags: str):
    """The trainer of a method on the small networks, with its roles and their plans."""
    kind = method_named(method)
    run = parse(["--recipe", "tiny", "--method", method, *SAMPLER, *SETTINGS.get(method, ()), *flags])
    run, _ = rehearsal._small(run, kind, 1, dict.fromkeys(rehearsal.paths_of(run).values(), str(folder)))
    moving = {
        name: replace(role, learning_rate=1e-2, warmup_updates=0)
        for name, role in run.roles.items()
        if isinstance(role, TrainableConfig)
    }
    run = replace(run, **moving)
    plans = plan_roles(run, kind)
    check_method(run, {name: plan.config for name, plan in plans.items()}, plans)
    roles = load_roles(plans, ALONE)
    counts = rehearsal.Counts(1, 1.0, plans, roles)
    shape = (rehearsal.CHANNELS, 5 if run.sampler.chunks.causal else 2, 1, 1)
    return rehearsal._trainer(run, kind, ALONE, shape, counts, causal=True), roles, plans, counts


def networks(roles) -> dict[tuple[str, str], list[torch.Tensor]]:
    return {
        (name, expert): [p.detach().clone() for p in backbone.model.network.parameters()]
        for name, role in roles.items()
        if isinstance(role, Trainable)
        for expert, backbone in role.backbones.items()
    }


def balance(method: str, role: str, flags) -> str:
    """What the recipe of Wan2.2 sets where noise levels are drawn for clips or for the critic."""
    drawn = role == "critic" or method in ("finetune", "flow_dpo", "flow_map")
    return "natural" if drawn and not flags else "mixed"


def is_of_suite(method: str, role: str, side: str, flags: tuple[str, ...]) -> bool:
    """One side of each method, in turn, where it can be trained."""
    can = not flags and (method, role, side) not in REFUSED
    return can and role == "student" and side == ("high", "low")[list(METHODS).index(method) % 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "role", "side", "flags"), cells(CELLS, lambda cell: (cell[:2], *cell[2:]), is_of_suite)
)
def test_each_step_moves_the_trained_expert_alone(folder, monkeypatch, method, role, side, flags):
    """No pass with a gradient is one of the other expert, and where nothing runs the other it is not loaded."""
    other = {"high": "low", "low": "high"}[side]
    flags = (f"--{role}.{other}.no-trained", f"--{role}.expert-balance", balance(method, role, flags), *flags)
    if why := REFUSED.get((method, role, side)):
        with pytest.raises(UserError, match=why):
            built(folder, method, *flags)
        return
    trainer, roles, plans, counts = built(folder, method, *flags)
    passes, running = set(), type(roles[role]).running

    def watched(self, expert=""):
        passes.update({(self.name, expert)} if torch.is_grad_enabled() and self.keeps_graph else ())
        return running(self, expert)

    monkeypatch.setattr(type(roles[role]), "running", watched)
    idle = (role == "critic" and method != "distill_rl") or (role == "student" and side in IDLE.get(method, ""))
    assert plans[role].layout.left_out == ((other,) if idle else ())
    for step in range(2):
        before = networks(roles)
        counts.losses.append([])
        trainer.step(step)
        after = networks(roles)
        for seat, values in before.items():
            moved = any(not torch.equal(*pair) for pair in zip(values, after[seat], strict=True))
            if seat[0] == role:
                assert moved == (seat == (role, side)), (step, seat)
    if method not in ("self_forcing", "long_self_forcing", "streaming_tuning"):  # context passes have no gradient
        assert {expert for name, expert in passes if name == role} == {side}


@pytest.mark.parametrize("law", [ShiftedUniform(5.0), ShiftedGrid(5.0, (0.02, 0.98))])
@pytest.mark.parametrize("above", [True, False])
def test_the_law_of_one_side_is_the_law_given_the_side(law, above):
    """At evenly spread u it takes the levels of the law there, each as often relative to the others.

    By hand: sigma = 5 u / (1 + 4 u) is at least .9 for u in [9/14, 1), a share of 5/14.
    """
    u = (torch.arange(280_000, dtype=torch.float64) + 0.5) / 280_000
    levels = law(u)
    given = levels[(levels >= BOUNDARY) == above]
    drawn = law_on_side(law, (torch.arange(len(given), dtype=torch.float64) + 0.5) / len(given), BOUNDARY, above=above)
    torch.testing.assert_close(drawn, given, rtol=0, atol=1e-3 if isinstance(law, ShiftedGrid) else 1e-12)
    assert law_on_side(ShiftedUniform(5.0), torch.tensor(0.5).double(), BOUNDARY, above=True) == pytest.approx(
        115 / 120
    )
    for end in (0.0, 1 - 2**-53):  # rounding takes no level to the other side
        assert (
            bool(law_on_side(law, torch.tensor(end, dtype=torch.float64), BOUNDARY, above=above) >= BOUNDARY) == above
        )


def test_levels_of_chunks_are_of_the_trained_expert(folder):
    for side, other in (("high", "low"), ("low", "high")):
        student = built(folder, "finetune", f"--student.{other}.no-trained")[1]["student"]
        levels, _ = student.draw_noise_levels("sigma", range(64), Streams(0, 0), ShiftedUniform(3.0))
        by_frame = student.trained_levels(ShiftedUniform(3.0), torch.rand(64, 5, dtype=torch.float64))
        assert bool(((levels >= BOUNDARY) == (side == "high")).all())
        assert by_frame.shape == (64, 5) and bool(((by_frame >= BOUNDARY) == (side == "high")).all())


def test_levels_that_no_trained_expert_has_are_refused():
    layout = ExpertLayout(0.99, {"high": "a", "low": "b"}, ("high",))
    setup = setup_of(parse(["--method", "dmd2"]).sampler, {"critic": layout}, critic=TrainableConfig(low=STAYS))
    with pytest.raises(UserError, match="critic: no noise level that is drawn for it is of its trained expert, high"):
        setup.check_noise_levels("critic", ShiftedGrid(5.0, (0.02, 0.98)))
    setup.check_noise_levels("critic", ShiftedGrid(5.0, (0.02, 0.995)))


def test_an_expert_stays_loaded_where_a_validation_runs_it(folder):
    """Its sampler's levels decide: those of four steps have both experts, one call at pure noise has the high one."""
    for flags, idle in (
        (("--validate-every", "2"), ()),
        (("--validate-every", "2", "--sampler.num-steps", "1"), ("low",)),
    ):
        _, roles, plans, _ = built(folder, "finetune", "--student.low.no-trained", *flags)
        assert plans["student"].layout.left_out == idle
        assert roles["student"].experts == (("high", "low") if not idle else ("high",))
