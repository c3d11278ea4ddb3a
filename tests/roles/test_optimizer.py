"""AdamW over parts of weights: torch's bits with float32 moments; what stochastic rounding to bf16 must keep."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from helpers import CPU, REPO, assert_same, finetune
from torch import nn

from unified_trainer.methods.finetune import FinetuneConfig
from unified_trainer.parallel.fsdp import average_gradients
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles import optimizer
from unified_trainer.roles.ema import EMA, HostEMA
from unified_trainer.roles.learner import Learner
from unified_trainer.roles.optimizer import MOMENTS, AdamW, MovedAdamW
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.roles.stochastic_rounding import random_bits, round_to_bf16_

OPTIONS = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SMALL_STATE = TrainableConfig(learning_rate=1e-3, ema_decay=0.5, moments="bf16", ema_device="cpu")


def weights() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {f"layer {i}": nn.Parameter(torch.randn(3, i + 1, generator=draw)) for i in range(4)}


def test_float32_moments_are_torchs():
    ours, theirs = weights(), weights()
    one, other = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs.values(), lr=0.1, **OPTIONS)
    for update in range(3):
        for key in list(ours)[: 3 if update == 1 else 4]:  # one weight has no gradient in the second update
            ours[key].grad = theirs[key].grad = (theirs[key].detach() - update).sin()
        one.step(0.1, update)
        other.step()
        for p in (*ours.values(), *theirs.values()):
            p.grad = None
    assert_same(ours, theirs)
    assert_same(one.state(), {f"{k}/{name}": v for k, p in theirs.items() for name, v in other.state[p].items()})


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_moving_a_bucket_at_a_time_changes_no_bit(monkeypatch, moments):
    monkeypatch.setattr(optimizer, "BUCKET", 7)
    ours, theirs = weights(), weights()
    one = MovedAdamW(ours, device=CPU, place=CPU, moments=moments, **OPTIONS)
    other = AdamW(theirs, moments=moments, **OPTIONS)
    for update in range(3):
        for key in list(ours)[: 3 if update == 1 else 4]:
            ours[key].grad = theirs[key].grad = (theirs[key].detach() - update).sin()
        for each in (one, other):
            each.step(0.1, update)
    assert_same(ours, theirs)
    assert_same(one.state(), other.state())


@pytest.mark.slow
def test_what_lies_in_cpu_memory_is_on_the_device_a_bucket_at_a_time(tmp_path):
    """The same bits; beside weights and moments a bucket of two weights is there, and AdamW's temporary tensor."""
    script, file = REPO / "tests" / "parallel" / "moved_optimizer.py", tmp_path / "found.json"
    # Not a copy of this process: torch's autograd must not have run before it knows the device.
    subprocess.run([sys.executable, script, file], env=os.environ | {"PYTHONPATH": str(REPO)}, check=True)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert len(found) == 4 and all(case["same"] for case in found.values())
    places = {"moments": [["npu"], ["cpu"]], "weights": [["cpu"], ["npu"]]}
    assert {name: case["places"] for name, case in found.items()} == {
        f"{name} {moments}": where for name, where in places.items() for moments in ("fp32", "bf16")
    }
    bucket, one = 4 * 128, 4 * 64  # bytes
    assert {found[f"{name} fp32"]["extra"] for name in places} == {2 * bucket + 2 * one}


@pytest.mark.parametrize(
    ("offload", "kind"),
    [((), AdamW), (("weights",), MovedAdamW), (("optimizer",), MovedAdamW), (("weights", "optimizer"), AdamW)],
)
def test_each_of_weights_and_moments_has_a_switch(offload, kind):
    mesh = Mesh(CPU, size=2, config=ParallelConfig(**{f"offload_{name}": True for name in offload}))
    learner = Learner("student", weights(), TrainableConfig(), mesh)
    assert type(learner._optimizer) is kind


def test_rounding_goes_to_a_neighbor_and_is_right_in_the_mean():
    """1 + 2^-7 / 8 is an eighth of the way from 1 to the next bf16; of n draws its share is 1/8 +- sqrt(7/64 / n)."""
    n, share = 2**17, 0.125
    for sign in (1, -1):
        out = torch.empty(n, dtype=torch.bfloat16)
        round_to_bf16_([out], [torch.full((n,), sign * (1 + share * 2**-7))], random_bits(3, [(5, n)], CPU))
        assert set(out.tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        up = float((out.abs() > 1).double().mean())
        assert abs(up - share) < 5 * (share * (1 - share) / n) ** 0.5
    exact = torch.tensor([0.0, 1.5, -2.0])
    rounded = torch.empty(3, dtype=torch.bfloat16)
    round_to_bf16_([rounded], [exact.clone()], torch.full((3,), -1, dtype=torch.int32))
    assert torch.equal(rounded.float(), exact)


def test_random_bits_are_of_the_position_and_fair():
    n = 2**16
    bits = random_bits(7, [(2**32 - 10, 20), (0, n)], CPU)
    assert torch.equal(bits[10:20], bits[20:30])  # positions wrap
    parts = random_bits(7, [(100, n - 100)], CPU)
    assert torch.equal(parts, bits[120:])
    other = random_bits(8, [(0, n)], CPU)
    for one, two in ((bits[20:], other), (bits[20:], bits[20:] >> 16), (bits[20:-1], bits[21:])):
        for bit in range(16):
            first, second = (one >> bit & 1).double(), (two >> bit & 1).double()
            assert abs(float(first.mean()) - 0.5) < 5 * 0.5 / n**0.5
            assert abs(float(((first - 0.5) * (second - 0.5)).mean())) < 5 * 0.25 / n**0.5


def held(moments: str, updates: int, *, size: int = 4096) -> dict[str, torch.Tensor]:
    """The state after updates with one gradient, 1; the key is that of a weight."""
    p = nn.Parameter(torch.zeros(size))
    one = AdamW({"w": p}, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, moments=moments)
    for update in range(updates):
        p.grad = torch.ones(size)
        one.step(1e-3, update)
    return one.state()


def test_a_second_moment_in_bf16_does_not_stand_still():
    """After k updates it is 1 - beta2^k; rounded to the nearest it would stop where 1e-3 of the rest is half a step."""
    state = held("bf16", 600)
    assert {state[f"w/{name}"].dtype for name in MOMENTS} == {torch.bfloat16}
    assert float(state["w/exp_avg_sq"].float().mean()) == pytest.approx(1 - 0.999**600, rel=1e-3)
    assert float(state["w/exp_avg"].float().mean()) == pytest.approx(1.0, rel=1e-3)


def test_bf16_moments_solve_a_quadratic_as_float32_does():
    """Noisy gradients of sum s (w - 1)^2 / 2 over scales s from 1e-2 to 1: the same distance within 2%."""
    scale, ends = torch.logspace(-2, 0, 4096), []
    for moments in ("fp32", "bf16"):
        p, draw = nn.Parameter(torch.zeros(4096)), torch.Generator().manual_seed(0)
        one = AdamW({"w": p}, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, moments=moments)
        for update in range(200):
            p.grad = scale * (p.detach() - 1 + 0.5 * torch.randn(4096, generator=draw))
            one.step(0.01, update)
        ends.append(float((p.detach() - 1).square().mean()))
    assert ends[0] < 0.05
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


@pytest.mark.slow
def test_a_resumed_run_with_bf16_moments_and_an_ema_on_the_cpu_is_the_same_run():
    """Bit for bit; its losses are those of float32 moments within a hundredth."""
    config, state = FinetuneConfig(batch_size=4, micro_batch=4), SMALL_STATE
    straight = finetune(config, role=state, moves=True)
    losses = [straight.step(step)["loss"] for step in range(12)]
    kept = {}
    for steps in (range(6), range(6, 12)):
        one = finetune(config, role=state, moves=True)
        state_of = one.tensors()
        for key, value in kept.items():
            state_of[key].copy_(value)
        one.roles["student"].load_state_dict({key.removeprefix("student/"): v for key, v in state_of.items()})
        for step in steps:
            one.step(step)
        kept = {key: value.clone() for key, value in one.tensors().items()}
    assert_same(kept, straight.tensors())
    exact = finetune(config, role=TrainableConfig(learning_rate=1e-3), moves=True)
    assert losses == pytest.approx([exact.step(step)["loss"] for step in range(12)], rel=1e-2)
    assert losses[-1] < losses[0]


def test_an_average_on_the_cpu_is_the_other_one_whatever_happens_to_the_weights_meanwhile():
    ours, theirs = weights(), weights()
    host, same, gate = HostEMA(ours, 0.75, 1), EMA(theirs, 0.75, 1), threading.Event()
    for update in range(1, 4):
        for p in (*ours.values(), *theirs.values()):
            p.data.mul_(1.5)
        host._thread.submit(gate.wait, 10)  # the thread is busy until the weights have changed
        host.update(update)
        same.update(update)
        for p in ours.values():
            p.data.add_(100)
        gate.set()
        assert_same(host.shadow, same.shadow)
        for key, p in ours.items():
            p.data.copy_(theirs[key].data)
        gate.clear()
    with host.swapped():
        assert_same(ours, same.shadow)
    assert_same(ours, theirs)


def test_an_average_on_the_cpu_does_not_hide_what_its_thread_raised(monkeypatch):
    one = HostEMA(weights(), 0.75)
    monkeypatch.setattr(EMA, "_follow", lambda *_: 1 / 0)
    one.update(1)
    with pytest.raises(ZeroDivisionError):
        _ = one.shadow


def test_ranks_say_which_weights_have_gradients_before_they_average(monkeypatch):
    """Equal counts and equal sums of numbers do not make them equal."""
    said, mesh = [], Mesh(CPU)
    monkeypatch.setattr(Mesh, "assert_same", lambda _, text: said.append(text))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    object.__setattr__(mesh, "size", 2)
    for numbers in ((0, 3), (1, 2)):
        weights = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
        for number in numbers:
            weights[number].grad = torch.full((2,), 4.0)
        average_gradients(weights, mesh)
        assert [p.grad is not None and p.grad.tolist() for p in weights].count([2.0, 2.0]) == 2
    assert said[0] != said[1]


def test_averaging_gradients_on_one_rank_needs_no_process_group():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    average_gradients([p], Mesh(CPU))
    assert torch.equal(p.grad, torch.ones(2))
