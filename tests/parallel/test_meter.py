"""The meter: FLOPs agree with torch's own counter, and every second belongs to one phase."""

import functools
import json

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from forked import program
from helpers import (
    ALONE,
    FEW_STEPS,
    LATENT_SHAPE,
    SMALL,
    WAN,
    adapted,
    dance_grpo,
    frozen,
    small_batch,
    small_causal,
    small_model,
    trainable,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unified_trainer.basics.errors import UserError
from unified_trainer.methods.dance_grpo import DanceGRPOConfig
from unified_trainer.models.diffusers_model import DiffusersModel
from unified_trainer.models.pass_flops import count_pass
from unified_trainer.models.wan.flow_map import FlowMapWanModel
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.parallel import device
from unified_trainer.parallel.meter import Meter, detail, phase, step_cost
from unified_trainer.roles import pass_costs
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.experts import ExpertPair
from unified_trainer.roles.role import Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.roles.value import Value
from unified_trainer.sampling.solver import SamplerConfig, generate, predict_chunks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOKENS = LATENT_SHAPE[1] * LATENT_SHAPE[2] * LATENT_SHAPE[3]


def counted(work) -> tuple[Meter, int]:
    """A meter of what `work` does, and torch's count, which knows attention as products of matrices."""
    condition()
    meter, torchs = Meter(CPU), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), torchs, meter.measure():
        work()
    return meter, torchs.get_total_flops()


def noise(count: int = 4, frames: int = LATENT_SHAPE[1]) -> torch.Tensor:
    shape = (count, LATENT_SHAPE[0], frames, *LATENT_SHAPE[2:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@functools.cache
def condition():
    """Of four captions; the text encoder runs outside of what is counted."""
    return small_batch(4).cond


def velocity(role: Role, x_t: torch.Tensor | None = None) -> torch.Tensor:
    x_t = noise() if x_t is None else x_t
    return role.velocity(x_t, torch.linspace(0.2, 0.95, 4, dtype=torch.float64), condition())


# FLOPs.


def test_a_forward_pass_is_counted_as_torch_counts_it():
    role = frozen("teacher")
    with torch.no_grad():
        meter, torchs = counted(lambda: velocity(role))
    assert meter.flops == torchs > 0
    assert meter.tokens == 4 * TOKENS


def test_guidance_is_two_samples():
    batch, role = small_batch(4), frozen("teacher")
    sigma = torch.full((4,), 0.5)
    meter, torchs = counted(lambda: role.guided_velocity(noise(), sigma, batch.cond, batch.uncond, 3.0))
    assert meter.flops == torchs
    assert meter.tokens == 2 * 4 * TOKENS


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_pass_is_twice_the_forward_pass(checkpointing):
    """What checkpointing recomputes is not counted. The network's inputs need no gradient, which torch leaves out."""
    role = trainable(config=TrainableConfig(activation_memory="full" if checkpointing else "none"))
    with torch.no_grad():
        forward, _ = counted(lambda: velocity(role))
    both, torchs = counted(lambda: velocity(role).square().mean().backward())
    assert both.flops == 3 * forward.flops and both.tokens == forward.tokens
    if not checkpointing:
        embedder, texts = role.network.condition_embedder, condition()["text"].shape[1]
        rows = {role.network.patch_embedding: 4 * TOKENS, embedder.text_embedder.linear_1: 4 * texts}
        rows[embedder.time_embedder.linear_1] = 4
        assert both.flops - torchs == sum(2 * layer.weight.numel() * count for layer, count in rows.items())


def test_a_value_is_counted_up_to_the_features():
    """Three blocks of five, and the output layer, through which nothing goes back. Heads are not counted."""
    role = Value("value", Backbone(WanModel.load(WAN, CPU), ALONE, trained=True), TrainableConfig())
    role._heads[""].weight.data.fill_(1.0)
    at = (noise(), torch.linspace(0.2, 0.95, 4, dtype=torch.float64), condition())
    with torch.no_grad():
        forward, torchs = counted(lambda: role.value(*at))
        whole, _ = counted(lambda: role.velocity(*at))
    head = 2 * 4 * role.network.config.num_attention_heads * role.network.config.attention_head_dim
    assert forward.flops == torchs - head and 0.6 < forward.flops / whole.flops < 0.65
    both, torchs = counted(lambda: role.value(*at).sum().backward())
    embedder, texts = role.network.condition_embedder, condition()["text"].shape[1]
    rows = {role.network.patch_embedding: 4 * TOKENS, embedder.text_embedder.linear_1: 4 * texts}
    rows[embedder.time_embedder.linear_1] = 4
    assert both.flops - (torchs - 3 * head) == sum(2 * layer.weight.numel() * n for layer, n in rows.items())


def test_a_pass_whose_gradient_is_never_asked_for_is_forward_only():
    role = trainable()
    with torch.no_grad():
        forward, _ = counted(lambda: velocity(role))
    kept, _ = counted(lambda: velocity(role))
    assert kept.flops == forward.flops


def test_an_adapter_is_counted_with_its_own_role_only():
    """A frozen matrix has no gradient of its own: its products cost two thirds of a trained one's.

    Torch also leaves out the text and what lies before the first adapter, a tenth of two blocks.
    """
    backbone = adapted()
    student = Trainable("student", backbone, TrainableConfig())
    teacher = Role("teacher", backbone, RoleConfig())
    with torch.no_grad():
        bare, torchs_bare = counted(lambda: velocity(teacher))
        with_adapter, torchs = counted(lambda: velocity(student))
    assert bare.flops == torchs_bare and with_adapter.flops == torchs > torchs_bare
    large = torch.randn(4, LATENT_SHAPE[0], 4, 16, 16)
    both, torchs = counted(lambda: velocity(student, large).square().mean().backward())
    assert torchs < both.flops == pytest.approx(torchs, rel=0.1)


def test_a_flow_map_embeds_two_times():
    role = Role("teacher", Backbone(FlowMapWanModel.open(WAN, "transformer"), ALONE), RoleConfig())
    with torch.no_grad():
        meter, torchs = counted(lambda: velocity(role))
    assert meter.flops == torchs


def test_each_of_two_experts_counts_its_rows():
    pair = ExpertPair(Backbone(small_model(0), ALONE), Backbone(small_model(1), ALONE), 0.6)
    two, torchs = counted(lambda: velocity(Role("teacher", pair, RoleConfig())))
    one, _ = counted(lambda: velocity(frozen("teacher")))
    assert two.flops == torchs == one.flops and two.tokens == one.tokens


CHUNKS = ChunkConfig(chunk_frames=1)


def causal() -> CausalStudent:
    return CausalStudent("student", Backbone(small_causal(), ALONE, trained=True), TrainableConfig())


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_causal_passes_are_counted_with_their_cache(guidance_scale):
    """Keys of finished chunks, the text's keys that only the first pass computes, and a window that drops chunks."""
    sampler = SamplerConfig(
        num_steps=2, guidance_scale=guidance_scale, chunks=ChunkConfig(chunk_frames=1, window_frames=2)
    )
    student, batch = causal(), small_batch(2)
    whole = noise(2, frames=4)
    with torch.no_grad():
        meter, torchs = counted(lambda: predict_chunks(student, whole, batch, sampler, lambda s: whole, [1] * 4))
    assert meter.flops == torchs


def test_masked_attention_counts_the_pairs_that_it_allows():
    """Two chunks of one frame: three of the four pairs of frames; all matrices as in the pass without a mask."""
    student, batch, sigma = causal(), small_batch(2), torch.full((2,), 0.5)
    with torch.no_grad():
        whole, _ = counted(lambda: student.velocity(noise(2), sigma, batch.cond))
        masked, _ = counted(lambda: student.masked_velocity(noise(2), sigma, batch.cond, CHUNKS))
    width, blocks = 24, 2
    assert whole.flops - masked.flops == 4 * width * blocks * 2 * TOKENS**2 // 4


class Convolutions(ModelMixin, ConfigMixin):
    """A block of a convolution, and one beside it; with `reads` its forward needs a value of its input."""

    @register_to_config
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Conv3d(16, 16, 3, padding=1), torch.nn.Conv3d(16, 16, 1)])

    def forward(self, x):
        if self.config.reads:
            x = x / x.abs().max().item()
        for block in self.blocks:
            x = block(x)
        return x


class ConvolutionsModel(DiffusersModel):
    network_class, adapter_layers, feature_size = Convolutions, (), 16

    @property
    def blocks(self):
        return tuple(self.network.blocks)

    def velocity(self, x_t, sigma, cond):
        return self.network(x_t)

    def example(self, shape=None, samples=1, text_tokens=4):
        raise NotImplementedError("nothing compares or traces it")


def test_a_network_without_attention_counts_every_matrix_at_every_position():
    role = Role("teacher", Backbone(ConvolutionsModel(Convolutions()), ALONE), RoleConfig())
    with torch.no_grad():
        meter, torchs = counted(lambda: velocity(role))
    positions = 4 * LATENT_SHAPE[1] * LATENT_SHAPE[2] * LATENT_SHAPE[3]
    assert meter.flops == torchs == 2 * 16 * 16 * (27 + 1) * positions and meter.tokens == positions


def test_a_network_that_reads_values_is_not_counted_and_says_so_once(capsys):
    """No rate is measured then; plan refuses such a network."""
    model = ConvolutionsModel(Convolutions(reads=True))
    role, meter = Role("teacher", Backbone(model, ALONE), RoleConfig()), Meter(CPU)
    with torch.no_grad(), meter.measure():
        for count in (2, 2, 4):
            role.velocity(noise(count), torch.full((count,), 0.5), condition())
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "teacher: no MFU is measured: the FLOPs of Convolutions are unknown" in said[0]
    cost = step_cost(meter, ALONE, 8)
    assert "samples_per_second" in cost
    assert not cost.keys() & {"tokens_per_second", "model_flops_per_second", "mfu"}
    with torch.device("meta"), pytest.raises(UserError, match="its forward fails on them"):
        count_pass(model := ConvolutionsModel(Convolutions(reads=True)), lambda: model.network(noise().to("meta")))


class Twice(torch.nn.Module):
    """A block that runs its layer once, or twice by a switch that its weights do not show."""

    runs = 0

    def __init__(self, *, twice):
        super().__init__()
        self.twice, self.layer = twice, torch.nn.Linear(4, 4)

    def forward(self, x):
        Twice.runs += 1
        return self.layer(self.layer(x)) if self.twice else self.layer(x)


def test_blocks_alike_run_once_and_all_are_counted():
    """6 rows through a matrix of 16 weights take 192 FLOPs."""
    with torch.device("meta"):
        network = torch.nn.Sequential(*(Twice(twice=twice) for twice in (False, False, True, False)))
        network.blocks = tuple(network)
        count = count_pass(ConvolutionsModel(network), lambda: network(torch.zeros(2, 3, 4)))
    assert [(part.module, part.block, part.products) for part in count.parts] == [
        (f"{i}.layer", i, 384 if i == 2 else 192) for i in range(4)
    ]
    assert Twice.runs == 2
    assert not any("forward" in vars(block) for block in network)


def test_a_pass_is_counted_on_the_copy_once_for_each_shape(monkeypatch):
    """Two passes of one shape, of which one has a mask, run the copy once; so do roles of one architecture."""
    student, other, runs = causal(), causal(), []
    monkeypatch.setattr(pass_costs, "_PLAIN", {})  # the counts of other tests
    monkeypatch.setattr(pass_costs, "count_pass", lambda *given: runs.append(given) or count_pass(*given))
    with torch.no_grad(), Meter(CPU).measure():
        for count in (2, 2, 4):
            at = (noise(count), torch.full((count,), 0.5), small_batch(count).cond)
            student.masked_velocity(*at, CHUNKS)
            student.velocity(*at)
            other.velocity(*at)
    assert len(runs) == 2


def test_nothing_is_counted_outside():
    assert Meter.current() is None
    role, meter = frozen("teacher"), Meter(CPU)
    velocity(role)
    detail("step 1/2")
    assert meter.flops == meter.tokens == 0


# Phases.


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr(device, "time", one)
    return one


def test_time_belongs_to_the_innermost_phase(clock):
    shown = []
    meter = Meter(CPU, shown.append)
    with meter.measure():
        clock.now += 1
        with phase("update", 1, 4):
            clock.now += 2
            with phase("rollout", 3, 8):
                clock.now += 4
                with phase("rollout"):
                    detail("step 2/20")
                    clock.now += 8
            with phase("score"):
                clock.now += 16
            clock.now += 32
        clock.now += 64
    assert meter.seconds() == {"other": 65, "update": 34, "rollout": 12, "score": 16}
    assert [label for i, label in enumerate(shown) if label != (shown[i - 1] if i else None)] == [
        *("update 1/4", "rollout 3/8", "rollout 3/8, step 2/20", "rollout 3/8", "update 1/4", "score", "update 1/4")
    ]


def test_a_phase_that_fails_ends(clock):
    meter = Meter(CPU)
    with pytest.raises(ValueError, match="no"), meter.measure(), phase("decode"):
        clock.now += 1
        raise ValueError("no")
    assert meter.seconds() == {"other": 0, "decode": 1} and Meter.current() is None


def test_a_training_step_names_its_phases_without_a_word_of_the_method():
    """Four prompts in two parts, two updates: what the bar shows, in order."""
    config = DanceGRPOConfig(num_prompts=4, num_samples=2, prompts_per_update=2, rollout_batch=4, update_batch=4)
    trainer = dance_grpo(config)
    shown = []
    meter = Meter(CPU, shown.append)
    with meter.measure():
        trainer.step(0)
    assert meter.seconds().keys() == {"other", "data", "update", "rollout", "decode", "score", "optimizer"}
    order = dict.fromkeys(label for label in shown if "loss" not in label)
    expected = ["data", "update 1/2", "rollout 1/2", "rollout 1/2, step 1/4", "rollout 1/2, step 4/4"]
    expected += ["decode", "score", "rollout 2/2, step 1/4", "optimizer", "update 2/2"]
    assert [label for label in order if label in expected] == expected
    assert meter.flops > 0


def test_sampling_outside_of_training_is_a_rollout(clock):
    shown = []
    meter = Meter(CPU, shown.append)
    with meter.measure():
        generate(frozen("teacher"), noise(2), small_batch(2), FEW_STEPS, lambda s: noise(2))
    assert shown[0] == "rollout" and "rollout, step 4/4" in shown and "rollout" in meter.seconds()


# Peaks.


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A4000", None),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_name(name, tflops):
    found = device.peak_flops(name)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


# Ranks.


@pytest.mark.ranks
def test_two_ranks_count_the_work_of_one(tmp_path):
    """Whether they share the samples or the tokens of each sample."""
    cases = {"one": (1, ()), "samples": (2, ()), "tokens": (2, ("--parallel.sequence", "2"))}
    for name, (ranks, words) in cases.items():
        run = ["-m", "unified_trainer", *SMALL["dance_grpo"], *words, "--output", str(tmp_path / name)]
        done = program(*run, ranks=ranks)
        assert done.returncode == 0, done.stderr
    one, *others = (json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in cases)
    for two in others:
        for name in ("train/tokens_per_second", "train/model_flops_per_second"):
            assert two[name] * two["train/seconds"] == pytest.approx(one[name] * one["train/seconds"]), name
