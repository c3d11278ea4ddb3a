"""Ranks that share the tokens of a pipeline's network have the velocities, features and gradients of one rank."""

import sys
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from forked import program
from helpers import CPU, assert_near, assert_one_training, flags
from pipelines.images import IMAGES
from pipelines.videos import VIDEOS
from safetensors.torch import load_file

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.models.diffusers_model import widen
from unified_trainer.models.pipeline.hunyuan_video15 import KeyMasked, with_masks
from unified_trainer.models.pipeline.sequence import TOKENS, SharedTokens, heads_of
from unified_trainer.parallel import sequence
from unified_trainer.parallel.mesh import Mesh, ParallelConfig

sys.path.insert(0, str(Path(__file__).parent))
import shared_tokens
from test_meshes import below

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers about its own code


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns what so many ranks wrote."""
    root, held = tmp_path_factory.mktemp("shared"), {}

    def of(ranks: int) -> dict[str, torch.Tensor]:
        if ranks not in held:
            shared_tokens.prepare(root, ranks)
            done, file = program(shared_tokens.__file__, root, ranks=ranks), root / f"{ranks}.safetensors"
            held[ranks] = load_file(file) if file.is_file() else done.stderr
        assert isinstance(held[ranks], dict), held[ranks]
        return held[ranks]

    return of


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "ranks"), [(name, 2) for name in shared_tokens.KINDS] + [(name, 4) for name in shared_tokens.OF_FOUR]
)
def test_ranks_that_share_tokens_have_the_gradients_of_one(written, name, ranks):
    one, shared = (below(written(ranks), f"{name}/{case}/") for case in ("one", "shared"))
    assert one.keys() == shared.keys()
    assert "features/True" in one or name in ("cogview4", "lumina2", "z-image")  # whose sample has no tokens apart
    for key in ("velocity", *(key for key in one if key.startswith("features/"))):
        torch.testing.assert_close(shared[key], one[key], rtol=0, atol=1e-5)
    assert one["gradients/x_t"].any() and sum(bool(x.any()) for x in below(one, "gradients/").values()) > 20
    assert_near(below(shared, "gradients/"), below(one, "gradients/"), 1e-5)


def test_every_class_that_shares_tokens_is_compared():
    kinds = {kind.pipeline for kind in shared_tokens.KINDS.values()}
    assert len(kinds) == len(TOKENS)


def test_a_network_that_is_not_compared_is_refused_by_name():
    network = torch.nn.Linear(2, 2)
    assert heads_of(network) == 1
    with pytest.raises(UserError, match=r"Linear cannot share tokens between ranks: set parallel\.sequence 1"):
        SharedTokens(network, (), Mesh(CPU, size=2, config=ParallelConfig(sequence=2)))


def of_second_rank() -> SharedTokens:
    """Return what the second of two ranks has of 3 tokens of a text and 5 of a sample."""
    network = shared_tokens.four_heads().transformer
    mesh = Mesh(CPU, rank=1, size=2, config=ParallelConfig(sequence=2))
    shared = SharedTokens(network, (*network.transformer_blocks, *network.single_transformer_blocks), mesh)
    shared._lengths = (3, 5)
    return shared


def test_angles_are_divided_as_the_tokens_beside_them():
    """The tokens of the text are 0 to 2 and those of the sample 3 to 7; a rank has two and three, with padding."""
    shared = of_second_rank()
    assert shared._part(0, torch.arange(8)).tolist() == [2, 0, 6, 7, 0]
    assert shared._part(1, torch.arange(5)[None]).tolist() == [[3, 4, 0]]
    assert shared._part(0, torch.arange(7)).tolist() == [*range(7)]


def test_one_rank_of_several_puts_tokens_back_in_order(monkeypatch):
    received = torch.tensor([0, 1, 3, 4, 5, 2, 99, 6, 7, 99]).view(1, 10, 1, 1)
    monkeypatch.setattr(sequence, "tokens_to_heads", lambda x, tokens, mesh: received)
    assert of_second_rank()._to_heads(torch.empty(1, 5, 2, 1), (3, 5)).flatten().tolist() == [*range(8)]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "method"), [("FluxPipeline", "dance_grpo"), ("HunyuanVideoPipeline", "dmd2")])
def test_a_training_step_is_that_of_one_rank(tmp_path, name, method):
    folder, sizes = tmp_path / name, {"prompts": tmp_path / "prompts.txt", "device": "cpu", "steps": 1}
    (IMAGES | VIDEOS)[name].write(folder)
    sizes["prompts"].write_text("a red circle\na blue square moving left")
    sizes |= {"video.height": 48, "video.width": 48, "sampler.num-steps": 2, "student.warmup-updates": 0}
    sizes |= {"validate-every": 0, "checkpoint-every": 1, "encoders.text-precision": "fp32"}
    sizes |= {"video.frames": 9} if name in VIDEOS else {}
    roles = {"dmd2": ("student", "teacher", "critic")}.get(method, ("student",))
    sizes |= {f"{role}.precision": "fp32" for role in roles}
    if method == "dmd2":
        sizes |= {"algorithm.batch-size": 2, "algorithm.micro-batch": 1, "algorithm.student-every": 1}
    else:
        groups = ("num-prompts", "num-samples", "prompts-per-update", "rollout-batch", "update-batch")
        sizes |= {f"algorithm.{name}": 2 for name in groups} | {"reward.path": "tiny", "reward.frames": "first"}
    given = sizes | {"method": method, "student.path": folder}
    assert main(flags(given | {"output": tmp_path / "one"})) == 0
    shared = flags(given | {"output": tmp_path / "two", "parallel.sequence": 2})
    done = program("-m", "unified_trainer", *shared, ranks=2)
    assert done.returncode == 0, done.stderr
    assert_one_training(tmp_path / "one", tmp_path / "two", 1)


def test_hunyuan_video_15_attends_by_a_mask_of_keys_as_by_its_mask_of_all_pairs():
    """But for the text's padding, which nothing reads."""
    torch.manual_seed(0)
    network = HunyuanVideo15Transformer3DModel(
        num_attention_heads=2, attention_head_dim=12, num_layers=1, num_refiner_layers=1, rope_axes_dim=(4, 4, 4)
    )
    attention = network.transformer_blocks[0].attn
    tokens, text = torch.randn(2, 5, 24), torch.randn(2, 3, 24)
    mask, angles = torch.tensor([[True, True, True], [True, False, False]]), torch.randn(2, 5, 12).unbind()
    expected = attention(tokens, text, mask, image_rotary_emb=angles)
    assert isinstance(attention.processor, HunyuanVideo15AttnProcessor2_0)
    with_masks(network)
    assert isinstance(attention.processor, KeyMasked)
    found = attention(tokens, text, mask, image_rotary_emb=angles)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][mask], expected[1][mask])


def test_norms_of_queries_compute_in_float32():
    norm, x = torch.nn.RMSNorm(24), torch.randn(3, 24).bfloat16()
    norm.register_forward_pre_hook(widen)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), torch.nn.RMSNorm(24)(x.float()))
