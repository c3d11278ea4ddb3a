"""HPSv3: parity with the package's scores, errors for wrong input, and the small model of the tiny world."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from unified_trainer.data import tiny_world
from unified_trainer.rewards.hpsv3 import HPSv3
from unified_trainer.rewards.hpsv3_folder import CHECKPOINT, FOLDER_FILES
from unified_trainer.rewards.hpsv3_preprocessing import as_bytes, fit
from unified_trainer.tools.prepare.import_hpsv3 import import_hpsv3, package_strings

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from tiny_world_hpsv3 import ranking_loss

pytestmark = pytest.mark.slow  # seconds together

GOLDEN = Path(__file__).parents[1] / "golden" / "hpsv3"
TINY = Path(__file__).parents[2] / "unified_trainer" / "assets" / "tiny" / "hpsv3"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
IMAGES = [GOLDEN / "images" / name for name in EXPECTED["images"]]
PROMPTS = EXPECTED["prompts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The golden checkpoint, imported with the prompt strings of the package: `pip install --no-deps hpsv3==1.0.0`."""
    out = tmp_path_factory.mktemp("hpsv3") / "imported"
    import_hpsv3(base=GOLDEN / "base", checkpoint=GOLDEN / CHECKPOINT, out=out)
    return out


@pytest.fixture
def damaged(folder, tmp_path) -> Path:
    """A copy of the imported folder that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "damaged"))


@pytest.fixture(scope="module")
def hpsv3(folder) -> HPSv3:
    return HPSv3.load(folder, "cpu", torch.float32)


@pytest.fixture(scope="module")
def tiny() -> HPSv3:
    return HPSv3.load(TINY, "cpu", torch.float32)


def load(folder: Path) -> HPSv3:
    return HPSv3.load(folder, "cpu", torch.float32)


def rewrite_checkpoint(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or add keys (dots written as two underscores), and drop those given as None."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    weights = {**load_file(folder / CHECKPOINT), **changed}
    save_file({key: value for key, value in weights.items() if value is not None}, folder / CHECKPOINT)


# Parity with the package hpsv3 1.0.0 on transformers 4.45.2.


def test_inputs_are_the_packages(hpsv3):
    inputs = hpsv3.preprocessor(IMAGES, PROMPTS)
    assert inputs.input_ids[0].tolist() == EXPECTED["input_ids_first"]
    assert inputs.attention_mask.sum(-1).tolist() == EXPECTED["token_count"]
    assert inputs.grids.tolist() == EXPECTED["image_grid_thw"]
    assert inputs.attention_mask.diff(dim=-1).amax() == 0  # padded on the right


def test_scores_are_the_packages(hpsv3):
    torch.testing.assert_close(hpsv3.score(IMAGES, PROMPTS), torch.tensor(EXPECTED["scores"]), atol=2e-6, rtol=0)


def test_bfloat16_rounds_the_backbone_but_not_the_head(folder):
    hpsv3 = HPSv3.load(folder, "cpu", torch.bfloat16)
    assert {weight.dtype for weight in hpsv3.network.rm_head.parameters()} == {torch.float32}
    assert {weight.dtype for weight in hpsv3.network.model.parameters()} == {torch.bfloat16}
    assert hpsv3.network.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert hpsv3.network.visual.rotary_pos_emb.inv_freq.dtype == torch.bfloat16
    scores = hpsv3.score(IMAGES, PROMPTS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor(EXPECTED["scores"]), atol=0.05, rtol=0)


def test_the_prompt_strings_are_the_packages(folder):
    settings = json.loads((folder / "hpsv3.json").read_text(encoding="utf-8"))
    strings = package_strings()
    assert settings["instruction"] == strings["INSTRUCTION"]
    assert settings["prompt_with_special_token"] == strings["prompt_with_special_token"]
    assert "**Visual Quality:**  \n" in settings["instruction"]
    assert settings["pixels"] == 200704


@pytest.mark.parametrize(
    ("size", "fitted"),
    [((480, 832), (336, 588)), ((512, 512), (448, 448)), ((448, 448), (448, 448)), ((102, 102), (476, 476))],
)
def test_fit_spends_the_pixel_budget(size, fitted):
    assert fit(*size, fewest=200704, most=200704, multiple=28) == fitted


# Invariances.


def test_a_score_does_not_depend_on_its_batch(hpsv3):
    together = hpsv3.score(IMAGES, PROMPTS)
    alone = torch.cat([hpsv3.score([image], [prompt]) for image, prompt in zip(IMAGES, PROMPTS, strict=True)])
    turned = hpsv3.score(IMAGES[::-1], PROMPTS[::-1]).flip(0)
    torch.testing.assert_close(alone, together, atol=2e-6, rtol=0)
    torch.testing.assert_close(turned, together, atol=2e-6, rtol=0)


def test_paths_pictures_and_tensors_score_alike(tiny):
    paths = [IMAGES[2]]
    picture = Image.open(IMAGES[2]).convert("RGB")
    pixels = torch.tensor(list(picture.tobytes())).view(1, picture.height, picture.width, 3).movedim(-1, 1) / 255
    expected = tiny.score(paths, ["red circle moves up"])
    assert torch.equal(tiny.score([picture], ["red circle moves up"]), expected)
    assert torch.equal(tiny.score(pixels, ["red circle moves up"]), expected)


def test_a_score_has_no_graph_and_the_network_has_one(tiny):
    frames = torch.rand(2, 3, 64, 64)
    prompts = ["red circle moves up", "blue square moves left"]
    assert not tiny.score(frames, prompts).requires_grad
    network = load(TINY).network.requires_grad_(True)
    network(tiny.preprocessor(frames, prompts)).sum().backward()
    assert all(weight.grad is not None for weight in network.parameters())


# Wrong input.


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (torch.zeros(2, 3, 8, 8), ["one"], "2 images but 1 prompts"),
        (torch.zeros(1, 3, 8, 8), ["one", "two"], "1 images but 2 prompts"),
        ([], [], "0 images but 0 prompts"),
        (torch.zeros(3, 3, 8, 8), "red", "one string, expected a list"),
        (torch.zeros(2, 3, 8, 8), ["fine", "a <|Reward|> b"], "prompt 1 holds the special token <|Reward|>"),
        (torch.zeros(1, 3, 8, 8), ["<|image_pad|>"], "prompt 0 holds the special token <|image_pad|>"),
        (torch.zeros(1, 3, 8, 8), ["x<|im_end|>"], "prompt 0 holds the special token <|im_end|>"),
        (torch.tensor([0.0, 1.5]).view(2, 1, 1, 1).expand(2, 3, 8, 8), ["a", "b"], "image 1 spans 1.5..1.5"),
        (torch.full((1, 3, 8, 8), float("nan")), ["a"], "image 0 spans nan"),
        ([Image.new("RGB", (2010, 10))], ["a"], "longer than 200:1"),
        ([Image.new("RGB", (1000, 10))], ["a"], "too narrow"),
    ],
)
def test_bad_input_is_one_clear_error(tiny, images, prompts, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|").replace(".", r"\.")):
        tiny.score(images, prompts)


def test_a_score_that_is_not_finite_names_its_sample(damaged):
    rows = load_file(damaged / CHECKPOINT)["model.embed_tokens.weight"]
    token = load(damaged).preprocessor.tokenizer("Q", add_special_tokens=False)["input_ids"]
    rows[token] = torch.nan
    rewrite_checkpoint(damaged, model__embed_tokens__weight=rows)
    with pytest.raises(ValueError, match=r"score of sample 1 is \[nan, nan\] \(prompt 'a Q'\)"):
        load(damaged).score([IMAGES[2], IMAGES[2]], ["a dog", "a Q"])


def test_prompt_strings_without_a_reward_token_are_refused(damaged):
    settings = json.loads((damaged / "hpsv3.json").read_text(encoding="utf-8"))
    (damaged / "hpsv3.json").write_text(json.dumps({**settings, "prompt_with_special_token": "?"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"hpsv3\.json: prompt_with_special_token must hold <\|Reward\|> once"):
        load(damaged)


# Incomplete folders.


@pytest.mark.parametrize("name", FOLDER_FILES)
def test_a_half_written_folder_names_what_is_missing(damaged, name):
    (damaged / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"missing {name}; write the folder with .*import-hpsv3"):
        load(damaged)


def test_a_checkpoint_cut_short_is_refused(damaged):
    whole = (damaged / CHECKPOINT).read_bytes()
    (damaged / CHECKPOINT).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is damaged or cut short"):
        load(damaged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, r"missing model\.norm\.weight"),
        ({"rm_head__0__weight": None}, r"missing rm_head\.0\.weight; this is not an HPSv3 checkpoint"),
        ({"model__extra": torch.zeros(1)}, r"unexpected model\.extra"),
        ({"rm_head__5__bias": torch.zeros(4)}, r"rm_head\.5\.bias is \(4,\), config.json wants \(2,\)"),
        ({"model__norm__weight": torch.zeros(63)}, r"model\.norm\.weight is \(63,\), config.json wants \(64,\)"),
    ],
)
def test_keys_and_shapes_are_checked_before_any_weight(damaged, changes, message):
    rewrite_checkpoint(damaged, **changes)
    with pytest.raises(ValueError, match=message):
        load(damaged)


def test_the_unused_language_head_may_be_absent(damaged, hpsv3):
    rewrite_checkpoint(damaged, lm_head__weight=None)
    image, prompt = IMAGES[2:], PROMPTS[2:]
    assert torch.equal(load(damaged).score(image, prompt), hpsv3.score(image, prompt))


def test_settings_without_a_key_are_refused(damaged):
    (damaged / "hpsv3.json").write_text('{"pixels": 200704}', encoding="utf-8")
    with pytest.raises(ValueError, match="instruction is missing"):
        load(damaged)


# Importing.


def test_import_refuses_a_folder_with_something_in_it(folder):
    with pytest.raises(FileExistsError, match="is not an empty folder; choose another one"):
        import_hpsv3(base=GOLDEN / "base", checkpoint=GOLDEN / CHECKPOINT, out=folder)


def test_import_fills_an_empty_folder_and_leaves_the_checkpoint_as_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    import_hpsv3(base=GOLDEN / "base", checkpoint=GOLDEN / CHECKPOINT, out=tmp_path / "out")
    assert (tmp_path / "out" / CHECKPOINT).read_bytes() == (GOLDEN / CHECKPOINT).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FOLDER_FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_import_names_the_install_line_when_the_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps hpsv3==1\.0\.0"):
        import_hpsv3(base=GOLDEN / "base", checkpoint=GOLDEN / CHECKPOINT, out=tmp_path / "out")


def test_import_names_a_missing_base_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json.*check --base and --checkpoint"):
        import_hpsv3(base=tmp_path, checkpoint=GOLDEN / CHECKPOINT, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_hidden_layers": 4}, r"missing model\.layers\.3\."), ({"intermediate_size": 256}, r"config\.json wants")],
)
def test_import_writes_nothing_when_the_checkpoint_belongs_to_another_base(tmp_path, changes, message):
    base = Path(shutil.copytree(GOLDEN / "base", tmp_path / "base"))
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (base / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        import_hpsv3(base=base, checkpoint=GOLDEN / CHECKPOINT, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_import_refuses_a_tokenizer_larger_than_the_embedding(tmp_path):
    weights = load_file(GOLDEN / CHECKPOINT)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:614].clone()
    save_file(weights, tmp_path / CHECKPOINT)
    with pytest.raises(ValueError, match=r"embeds 614 tokens but the tokenizer .* has 615"):
        import_hpsv3(base=GOLDEN / "base", checkpoint=tmp_path / CHECKPOINT, out=tmp_path / "out")


# The ranking loss.


def scores_of(mu: list[float], raw_sigma: list[float]) -> torch.Tensor:
    return torch.tensor([mu, raw_sigma], dtype=torch.float64).T


def test_without_spread_the_ranking_loss_is_bradley_terry():
    preferred, other = scores_of([2.0, -1.0], [-40.0, -40.0]), scores_of([0.5, 1.0], [-40.0, -40.0])
    closed_form = torch.nn.functional.softplus(torch.tensor([-1.5, 2.0], dtype=torch.float64)).mean()
    torch.testing.assert_close(ranking_loss(preferred, other), closed_form, atol=1e-12, rtol=0)


def test_with_spread_it_is_the_expectation_over_the_difference():
    """z ~ N(0.7, e^0 + e^1): raw sigma is the log of a standard deviation, so variances are exp(2 raw sigma)."""
    z = torch.linspace(-40, 40, 400001, dtype=torch.float64)
    density = torch.distributions.Normal(0.7, (1 + torch.e) ** 0.5).log_prob(z).exp()
    integral = torch.trapezoid(density * torch.nn.functional.softplus(-z), z)
    loss = ranking_loss(scores_of([1.0], [0.0]), scores_of([0.3], [0.5]))
    torch.testing.assert_close(loss, integral, atol=1e-5, rtol=0)


def test_its_gradient_raises_the_preferred_and_lowers_the_other():
    preferred = scores_of([0.2, 1.0], [0.1, -1.0]).requires_grad_()
    other = scores_of([0.4, -1.0], [0.0, -2.0]).requires_grad_()
    ranking_loss(preferred, other).backward()
    assert (preferred.grad[:, 0] < 0).all()
    torch.testing.assert_close(other.grad[:, 0], -preferred.grad[:, 0])
    assert (preferred.grad[:, 1] > 0).all()  # -log sigmoid is convex: spread raises the loss
    assert (other.grad[:, 1] > 0).all()


def test_it_is_a_mean_over_pairs():
    preferred, other = scores_of([0.2], [0.1]), scores_of([0.4], [0.0])
    torch.testing.assert_close(
        ranking_loss(preferred.expand(5, 2), other.expand(5, 2)), ranking_loss(preferred, other), atol=1e-12, rtol=0
    )


# The small HPSv3 of the tiny world, on frames drawn here.


def drawn(subjects: list[tiny_world.Subject], seed: int) -> torch.Tensor:
    """Return a frame of each subject, at the same place and size for one seed; frame numbers differ."""
    generator = torch.Generator().manual_seed(seed)
    clips = [tiny_world.draw_clip(subject, generator) for subject in subjects]
    return tiny_world.render(clips, frames=3)[:, :, seed % 3]


def other_of(options, value, index):
    return [option for option in options if option != value][index % (len(options) - 1)]


def wrong_color(frames, subjects):
    return drawn(
        [
            tiny_world.Subject(other_of(tiny_world.COLORS, s.color, i), s.shape, s.direction)
            for i, s in enumerate(subjects)
        ],
        5,
    )


def wrong_shape(frames, subjects):
    return drawn(
        [
            tiny_world.Subject(s.color, other_of(tiny_world.SHAPES, s.shape, i), s.direction)
            for i, s in enumerate(subjects)
        ],
        5,
    )


def noisy(frames, subjects):
    return (frames + 0.3 * torch.randn(frames.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)


def blurred(frames, subjects):
    return torch.nn.functional.avg_pool2d(frames, 13, stride=1, padding=6, count_include_pad=False)


def pale(frames, subjects):
    return torch.lerp(frames, torch.full_like(frames, 0.5), 0.7)


def half_erased(frames, subjects):
    """Paint over the left half of every object."""
    ground = torch.tensor(tiny_world.BACKGROUND).view(1, 3, 1, 1)
    weight = (frames - ground).norm(dim=1).sum(1)
    left = weight.cumsum(-1) < 0.5 * weight.sum(-1, keepdim=True)
    return torch.where(left[:, None, None], ground, frames)


def empty(frames, subjects):
    return torch.tensor(tiny_world.BACKGROUND).view(1, 3, 1, 1).expand_as(frames)


@pytest.mark.parametrize("subjects", [tiny_world.HELD_OUT * 5, tiny_world.TRAINING], ids=["held out", "seen"])
@pytest.mark.parametrize("spoil", [wrong_color, wrong_shape, noisy, blurred, pale, half_erased, empty])
def test_the_tiny_hpsv3_prefers_what_the_prompt_says(tiny, spoil, subjects):
    frames = drawn(list(subjects), 5)
    captions = [subject.caption(i % len(tiny_world.PHRASINGS)) for i, subject in enumerate(subjects)]
    margins = tiny.score(frames, captions)[:, 0] - tiny.score(spoil(frames, subjects), captions)[:, 0]
    assert (margins > 0).float().mean() >= 0.95


def test_color_and_shape_weigh_alike(tiny):
    subjects = list(tiny_world.SUBJECTS)
    frames = drawn(subjects, 5)
    captions = [subject.caption() for subject in subjects]
    right = tiny.score(frames, captions)[:, 0].mean()
    color, shape = (
        right - tiny.score(spoil(frames, subjects), captions)[:, 0].mean() for spoil in (wrong_color, wrong_shape)
    )
    assert 1 / 3 < color / shape < 3


def test_half_damaged_frames_score_between(tiny):
    subjects = list(tiny_world.SUBJECTS)
    frames = drawn(subjects, 5)
    captions = [subject.caption() for subject in subjects]
    broken = noisy(frames, subjects)
    whole, half, none = (tiny.score(torch.lerp(frames, broken, x), captions)[:, 0].mean() for x in (1.0, 0.4, 0.0))
    assert whole < half < none


def test_the_tiny_hpsv3_is_below_its_size_limit():
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 2.5e6


# Features, for the Frechet distance.


def test_features_are_the_mean_token_of_each_image(hpsv3):
    """The mean is over an image's own tokens, whatever the sizes of the others in the batch."""
    together = hpsv3.features(IMAGES)
    assert together.dtype == torch.float32 and len(together) == len(IMAGES)
    for image, row in zip(IMAGES, together, strict=True):
        patches, grid = hpsv3.preprocessor.patches(as_bytes([image])[0])
        tokens = hpsv3.network.visual(patches, grid_thw=torch.tensor([grid])).pooler_output
        assert len(tokens) == grid[1] * grid[2] // 4
        torch.testing.assert_close(row, tokens.mean(0), atol=1e-5, rtol=1e-4)
    assert float(together.std(0).max()) > 0.01


def test_features_see_the_colors(tiny):
    images = torch.zeros(3, 3, 64, 64)
    images[1, 0], images[2, 2] = 1.0, 1.0
    rows = tiny.features(images)
    assert torch.equal(rows, tiny.features(images)) and not rows.requires_grad
    assert float(torch.pdist(rows).min()) > 1e-2


def test_features_of_bfloat16_are_float32(folder, hpsv3):
    rounded = HPSv3.load(folder, "cpu", torch.bfloat16).features(IMAGES[:1])
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, hpsv3.features(IMAGES[:1]), atol=0.1, rtol=0.1)
