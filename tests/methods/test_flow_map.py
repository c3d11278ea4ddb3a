"""Flow maps: the network, the target against derivatives and a closed form, the sampler, runs and what is refused."""

import dataclasses
import itertools
import json

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils
from forked import program
from helpers import (
    ALONE,
    LATENT_SHAPE,
    WAN,
    Calls,
    assert_near,
    assert_one_training,
    assert_same,
    checkpoint_of,
    cut_off,
    flags,
    frozen,
    metrics_of,
    random_clips,
    refused,
    small_batch,
    small_model,
    tiny_codec,
)
from i2v_folder import i2v_folder

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.methods.flow_map import FlowMap, FlowMapConfig, mean_flow_target
from unified_trainer.models.flow_map import end_of, ending_at
from unified_trainer.models.wan.family import WAN as FAMILY
from unified_trainer.models.wan.flow_map import FlowMapWanModel
from unified_trainer.numerics.flow import ShiftedUniform, per_sample, shift_sigma, unshift_sigma
from unified_trainer.numerics.kernels import transition
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig, generate
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import videos

LAYER = "student/weights/condition_embedder.span_proj.weight"
SHAPE = (2, 1, 2, 2)  # of one sample of the tests by formula
CONFIG = FlowMapConfig(batch_size=4, micro_batch=4, teacher_steps=6)
SAMPLER = SamplerConfig(num_steps=3, shift=5.0, guidance_scale=1.0)
STUDENT = TrainableConfig(flow_map=True, max_grad_norm=0.0)
RUN = {"recipe": "tiny", "method": "flow_map", "data.num-clips": 6, "steps": 2, "validate-every": 0}
RUN |= {"algorithm.batch-size": 4, "algorithm.micro-batch": 2, "student.warmup-updates": 0}


def flow_map_model(seed=0, scale=0.5):
    """The small network as a flow map, whose layer is drawn: at zero it would be a velocity."""
    model = FlowMapWanModel(small_model(seed).network, None, ALONE.device)
    draw = torch.Generator().manual_seed(5)
    for key, p in model.network.named_parameters():
        if key.endswith(model.new_layers):
            p.data = scale * torch.randn(p.shape, generator=draw)
    return model


def student(config=STUDENT, **given):
    return Trainable("student", Backbone(flow_map_model(**given), ALONE, trained=True), config)


def batch_with_latents(count=4):
    return small_batch(count, latents=torch.randn(count, *LATENT_SHAPE, generator=torch.Generator().manual_seed(2)))


def method(role=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return FlowMap(config, SAMPLER, student=role or student(), teacher=frozen("teacher", seed=1))


def levels(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_step_ends_at_the_highest_level_below_its_own():
    cond = small_batch(3).cond
    ends = ending_at(cond, levels(0.9, 0.6, 0.0).expand(3, -1))
    assert end_of(levels(1.0, 0.9, 0.3), ends).tolist() == [0.9, 0.6, 0.0]
    assert end_of(levels(0.0, 0.5, 1.0), cond).tolist() == [0.0, 0.5, 1.0]
    assert end_of(levels(0.4, 0.5, 0.5), ending_at(cond, levels(0.4, 0.2, 0.7)[:, None])).tolist() == [0.4, 0.2, 0.5]


def test_a_new_flow_map_is_the_velocity_of_its_folder_and_its_layer_learns():
    model, plain = (opened(WAN, "transformer") for opened in (FAMILY.flow_map, FAMILY.model))
    for each in (model, plain):
        each.read(ALONE)
    batch = small_batch(2)
    x, sigma = torch.randn(2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0)), levels(0.9, 0.4)
    cond = ending_at(batch.cond, levels(0.0, 0.4)[:, None])
    velocity = model.velocity(x, sigma, cond)
    assert torch.equal(velocity, plain.velocity(x, sigma, batch.cond))
    velocity.square().mean().backward()
    own = {key: p.grad for key, p in model.network.named_parameters() if key.endswith(model.new_layers)}
    assert len(own) == 2 and all(gradient.ne(0).any() for gradient in own.values())
    drawn = flow_map_model()
    both = [drawn.velocity(x, sigma, ending_at(batch.cond, r[:, None])) for r in (levels(0.0, 0.2), levels(0.5, 0.2))]
    assert not torch.allclose(both[0][0], both[1][0], atol=1e-3) and torch.equal(both[0][1], both[1][1])


def test_the_target_is_that_of_the_paper_to_first_order_in_the_teachers_step():
    """v - (t - r) du/dt, du/dt the exact derivative of a float64 network along (v, 1, 0) (arXiv:2505.13447)."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((10, 24), (24, 8))]

    def u(x, t, r):
        return ((torch.cat([x.flatten(1), t[:, None], r[:, None]], 1) @ weights[0]).tanh() @ weights[1]).view_as(x)

    x, v = (torch.randn(3, *SHAPE, generator=draw, dtype=torch.float64) for _ in range(2))
    t, r = levels(0.9, 0.6, 0.5), levels(0.0, 0.3, 0.5)
    here, slope = torch.autograd.functional.jvp(u, (x, t, r), (v, torch.ones_like(t), torch.zeros_like(r)))
    exact, errors = v - per_sample(t - r, v) * slope, []
    for h in (1e-3, 1e-4):
        t_next = torch.maximum(t - h, r)
        there = u(x - per_sample(t - t_next, x) * v, t_next, r)
        errors.append((mean_flow_target(here, there, v, t, t_next, r) - exact).abs().max().item())
    assert errors[0] < 0.1 and errors[1] == pytest.approx(errors[0] / 10, rel=0.05)
    assert torch.equal(mean_flow_target(here, there, v, t, t_next, r)[2], v[2])


def test_a_frame_that_is_known_has_no_part_in_the_target_of_a_step_to_clean_latents():
    """The velocity of TI2V's first frame is 0 / 0 at noise level 0, where the teacher's step ends too."""
    u, u_next, v = torch.randn(3, 1, *SHAPE, generator=torch.Generator().manual_seed(0))
    u_next[:] = torch.nan
    assert torch.equal(mean_flow_target(u, u_next, v, levels(0.1), levels(0.0), levels(0.0)), v)


def gaussian(x, t, r, s=0.5):
    """Mean velocity from t to r for x0 ~ N(0, s^2): x_r = x_t std(r) / std(t), std(t)^2 = (1 - t)^2 s^2 + t^2."""
    std = [((1 - level) ** 2 * s**2 + level**2).sqrt() for level in (t, r)]
    return per_sample((1 - std[1] / std[0]) / (t - r), x) * x


def test_the_flow_map_of_a_gaussian_is_its_own_target():
    """v = x d ln std / dt. Its exact flow map differs from the target as an Euler step does from the ODE."""
    x, s = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 0.5
    t, r = levels(0.9, 0.6, 0.3), levels(0.0, 0.3, 0.1)
    v, errors = per_sample((t - (1 - t) * s**2) / ((1 - t) ** 2 * s**2 + t**2), x) * x, []
    for h in (1e-2, 1e-3):
        there = gaussian(x - h * v, t - h, r)
        errors.append(
            (mean_flow_target(gaussian(x, t, r), there, v, t, t - h, r) - gaussian(x, t, r)).abs().max().item()
        )
    assert errors[1] < 0.01 and errors[1] == pytest.approx(errors[0] / 10, rel=0.1)


def test_the_noise_of_the_policy_keeps_a_gaussian_to_second_order_in_the_step():
    """Kernel dance takes the exact mean velocity for the velocity; std of x_next against std(r)."""
    one, t, errors = torch.ones(1, 1, dtype=torch.float64), 0.7, []
    for h in (1e-2, 1e-3):
        u = gaussian(one, levels(t), levels(t - h))
        std = [((1 - level) ** 2 * 0.25 + level**2) ** 0.5 for level in (t, t - h)]
        mean, noise = transition("dance", one, u, t, t - h, 0.3)
        errors.append(abs(float(((mean * std[0]) ** 2 + noise**2).sqrt()) - std[1]))
    assert errors[0] < 1e-4 and errors[1] == pytest.approx(errors[0] / 100, rel=0.05)


def test_euler_steps_of_the_teacher_are_a_fixed_point():
    """u and u' that follow the same Euler steps: (t - r) u = (t - t') v + (t' - r) u' for any u' and v."""
    u_next, v = torch.randn(2, 3, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t, t_next, r = levels(0.9, 0.6, 0.3), levels(0.8, 0.3, 0.2), levels(0.0, 0.3, 0.1)
    u = per_sample((t - t_next) / (t - r), v) * v + per_sample((t_next - r) / (t - r), v) * u_next
    torch.testing.assert_close(mean_flow_target(u, u_next, v, t, t_next, r), u)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_the_gradient_is_that_of_the_weighted_error_computed_sample_by_sample(power):
    """Steps without length, to clean latents and between are among the four samples; the target has no gradient."""
    ours, batch, rng = method(power=power), batch_with_latents(), Streams(6, 0)
    (loss,) = ours.step(batch, 0, rng, ALONE)
    loss.value.backward()
    found = {key: p.grad.clone() for key, p in ours.student.weights.items()}
    role, teacher, total, kinds = student(), frozen("teacher", seed=1), 0.0, set()
    draws = [rng.uniform(name, range(4)).tolist() for name in ("level", "end", "kind of step")]
    noise, w = rng.noise("noise", range(4), LATENT_SHAPE), CONFIG.guidance_scale
    for i, (u, below, kind) in enumerate(zip(*draws, strict=True)):
        t = float(shift_sigma(u, 5.0))
        r = t if kind < 0.5 else 0.0 if kind < 0.75 else float(shift_sigma(u * below, 5.0))
        kinds.add("equal" if r == t else "clean" if r == 0 else "between")
        t_next = max(float(shift_sigma(max(u - 1 / 6, 0.0), 5.0)), r)
        one, x0 = batch.take([i]), batch.latents[i : i + 1]
        x_t = (1 - t) * x0 + t * noise[i : i + 1]
        cond, uncond = (teacher.velocity(x_t, levels(t), each) for each in (one.cond, one.uncond))
        v = uncond + w * (cond - uncond)
        ending = ending_at(one.cond, levels(r)[:, None])
        predicted = role.velocity(x_t, levels(t), ending)
        target = v
        if r < t_next < t:
            there = role.velocity(x_t - (t - t_next) * v, levels(t_next), ending)
            target = v - (t_next - r) * (predicted - there) / (t - t_next)
        error = (predicted - target.detach()).square().mean()
        total = total + error / (error.detach() + CONFIG.offset) ** power / 4
    assert kinds == {"equal", "clean", "between"}
    total.backward()
    assert_near(found, {key: p.grad for key, p in role.weights.items()}, 1e-4)


def test_steps_without_length_are_flow_matching_to_the_teacher():
    ours, batch, rng = method(equal_share=1.0, clean_share=0.0, power=0.0), batch_with_latents(), Streams(3, 0)
    calls = Calls.of(ours.teacher)
    (loss,) = ours.step(batch, 0, rng, ALONE)
    x_t, sigma = calls.x_t[0][:4], calls.sigma[0][:4]
    v = ours.teacher.guided_velocity(x_t, sigma, batch.cond, batch.uncond, CONFIG.guidance_scale)
    expected = (ours.student.velocity(x_t, sigma, batch.cond) - v).square().mean()
    torch.testing.assert_close(loss.value.float(), expected, rtol=1e-5, atol=0)


def test_ends_follow_the_shares_and_are_even_before_the_shift():
    ours, rng, ids = method(), Streams(0, 0), range(4000)
    t = torch.full((4000,), 0.8, dtype=torch.float64)
    r = ours._ends(t, rng.uniform("end", ids), rng.uniform("kind of step", ids))
    assert float((r == t).double().mean()) == pytest.approx(0.5, abs=0.03)
    assert float((r == 0).double().mean()) == pytest.approx(0.25, abs=0.03)
    between = unshift_sigma(r[(r < t) & (r > 0)], 5.0) / unshift_sigma(0.8, 5.0)
    assert float(between.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(between.square().mean()) == pytest.approx(1 / 3, abs=0.03)


def test_levels_of_several_draws_lie_nearer_to_noise_and_the_teachers_step_stays():
    """Of two numbers the larger is below u with probability u^2; a step of the teacher is 1 / 6 before the shift."""
    assert ShiftedUniform(5.0, 2)(levels(0.25)) == shift_sigma(0.5, 5.0) and CONFIG.law == ShiftedUniform(5.0, 1)
    ours, batch, rng = method(level_draws=2, equal_share=0.0, clean_share=1.0), batch_with_latents(), Streams(6, 0)
    calls = Calls.of(ours.student)
    list(ours.step(batch, 0, rng, ALONE))
    below, own = (unshift_sigma(sigma, 5.0) for sigma in calls.sigma)
    torch.testing.assert_close(own, rng.uniform("level", range(4)).sqrt())
    torch.testing.assert_close(below, (own - 1 / 6).clamp(min=0))


@pytest.mark.parametrize(("solver", "ends"), [("ode", None), ("sde", 0.0)])
def test_the_sampler_steps_by_the_flow_map(solver, ends):
    """ode: x_r = x_t - (t - r) u(x_t, t, r) from level to level; sde: the x0 of a step to 0 is renoised."""
    role, batch = student(), small_batch(2)
    sampler = dataclasses.replace(SAMPLER, solver=solver)
    noise = torch.randn(3, 2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0))
    sigmas, x = sampler.sigmas().tolist(), noise[-1]
    with torch.no_grad():
        for s, (t, r) in enumerate(itertools.pairwise(sigmas)):
            end = r if ends is None else ends
            u = role.velocity(x, levels(t, t), ending_at(batch.cond, levels(end, end)[:, None]))
            x = x - (t - r) * u if ends is None else (1 - r) * (x - t * u) + r * noise[s]
    found = generate(role, noise[-1], batch, sampler, lambda s: noise[s])
    torch.testing.assert_close(found, x, rtol=0, atol=1e-5)


def test_calls_and_graphs():
    """The teacher runs once, cond and uncond together; the student once for the target and once with gradient."""
    ours = method()
    loader = Loader(random_clips(8), tiny_codec(), CONFIG.plan(), LATENT_SHAPE, "", 0, ALONE)
    trainer = Trainer(ours, {"student": ours.student}, loader, ALONE, seed=0)
    teacher, own = Calls.of(ours.teacher), Calls.of(ours.student)
    trainer.step(0)
    assert [len(x) for x in teacher.x_t] == [8] and teacher.graph == [False]
    assert sorted(own.graph) == [False, True] and [len(x) for x in own.x_t] == [4, 4]


@pytest.mark.parametrize("memory", ["selective", "full"])
def test_recomputation_changes_nothing(memory):
    def gradients(recompute):
        model = flow_map_model()
        backbone, batch = Backbone(model, ALONE, trained=True, recompute=recompute), small_batch(2)
        x = torch.randn(2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0))
        with backbone.running(""):
            model.velocity(
                x, levels(0.9, 0.4), ending_at(batch.cond, levels(0.0, 0.2)[:, None])
            ).square().mean().backward()
        return {key: p.grad for key, p in model.network.named_parameters() if p.grad is not None}

    assert_same(gradients(memory), gradients("none"))


def test_an_adapter_trains_the_layer_beside_it():
    backbone = Backbone(flow_map_model(), ALONE, adapters={"student": AdapterConfig(rank=2)})
    own = [key for key in backbone.weights("student") if ".lora_" not in key]
    assert own == ["condition_embedder.span_proj.weight", "condition_embedder.span_proj.bias"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"student.no-flow-map": True}, "student.flow_map must be True"),
        ({"student.boundary": 0.9, "student.low.no-trained": True}, "student.low.trained must be True"),
        ({"algorithm.equal-share": 0.9}, "must sum to at most 1"),
        ({"sampler.guidance-scale": 3}, "sampler.guidance_scale must be 1"),
        ({"sampler.chunks.chunk-frames": 1}, "a causal student is no flow map"),
        ({"student.sparse-attention.share": 0.5}, "no flow map has sparse attention"),
        ({"method": "dmd2", "student.flow-map": True}, "Flow maps are trained by dance_grpo, flow_map"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, capsys, words, message):
    given = RUN | words
    if given["method"] != "flow_map":
        given.pop("data.num-clips")
    assert main(flags(given | {"output": tmp_path / "run"})) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_networks_that_read_images_are_refused(tmp_path):
    with pytest.raises(UserError, match="reads an image as channels"):
        FAMILY.flow_map(i2v_folder(tmp_path / "i2v"), "transformer")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_resumes_bit_for_bit(tmp_path, rank):
    more = RUN | {"student.adapter.rank": rank, "checkpoint-every": 1}
    assert main(flags(more | {"output": tmp_path / "whole"})) == 0
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "half", 1))]) == 0
    whole = checkpoint_of(tmp_path / "whole", 2)
    assert_same(checkpoint_of(tmp_path / "half", 2), whole)
    assert whole[LAYER].ne(0).any()


@pytest.mark.slow
def test_a_policy_starts_from_a_flow_map_which_is_validated_in_one_step(tmp_path):
    flow = RUN | {"validation.sampler.num-steps": 1, "validation.num-samples": 2, "validate-every": 1, "steps": 1}
    assert main(flags(flow | {"output": tmp_path / "flow"})) == 0
    assert "validation/reward" in metrics_of(tmp_path / "flow")[-1]
    policy = {"method": "dance_grpo", "student.flow-map": True, "init-from": tmp_path / "flow", "steps": 1}
    policy |= {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
    policy |= {"validate-every": 0, "algorithm.kl-coefficient": 0.1}
    assert main(flags(policy | {"output": tmp_path / "policy"})) == 0
    (update,) = metrics_of(tmp_path / "policy")
    assert update["train/log_ratio_abs_max"] == 0 and update["train/kl"] == 0  # rollout, replay and reference agree
    before, after = (checkpoint_of(tmp_path / name, 1)[LAYER] for name in ("flow", "policy"))
    assert not torch.equal(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_an_export_makes_the_videos_of_sample_and_is_trained_on(tmp_path, monkeypatch, capsys, rank):
    """pipeline.py adds the layer, for steps of both solvers; a role that is no flow map refuses the folder."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    run, out = tmp_path / "run", tmp_path / "out"
    learnt = RUN | {"student.learning-rate": 1e-2, "student.adapter.rank": rank, "sampler.num-steps": 2}
    assert main(flags(learnt | {"output": run})) == 0
    said = refused(capsys, "export", run, out, "--quantize", "int8")
    assert "diffusers would drop its own layers in silence" in said and not out.exists()
    assert main(["export", str(run), str(out)]) == 0
    pipeline = DiffusionPipeline.from_pretrained(out, custom_pipeline="pipeline", trust_remote_code=True)
    sampler = pipeline.load_sampler(out)
    assert sampler.flow_map and "drops the layer" in json.loads((out / "unified_trainer.json").read_text())["how"]
    loaded = load_role(str(run), "student", None, ALONE, causal=True)
    for solver in ("ode", "sde"):
        own = dataclasses.replace(loaded.run.sampler, solver=solver)
        one = dataclasses.replace(loaded, run=dataclasses.replace(loaded.run, sampler=own))
        ours = torch.cat(list(videos(one, [Request("a red circle")], 5, 1)))
        pipeline.sampler = dataclasses.replace(sampler, solver=solver)
        theirs = pipeline("a red circle", generator=torch.Generator().manual_seed(5), output_type="pt").frames
        torch.testing.assert_close(theirs.transpose(1, 2), ours, rtol=0, atol=2e-5 if rank else 0)
    if rank:
        return
    again = RUN | {"student.path": out, "teacher.path": "tiny", "steps": 1, "output": tmp_path / "again"}
    assert main(flags(again)) == 0
    assert main(flags(RUN | {"student.path": out, "output": tmp_path / "refused"})) == 2
    assert "holds a flow map (span_proj): set flow_map of the role that opens it" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{}, {"parallel.sequence": 2}])
def test_two_ranks_learn_what_one_does(tmp_path, mesh):
    words = RUN | {"device": "cpu", "student.learning-rate": 1e-4}
    assert main(flags(words | {"output": tmp_path / "one"})) == 0
    done = program("-m", "unified_trainer", *flags(words | mesh | {"output": tmp_path / "two"}), ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 2)
