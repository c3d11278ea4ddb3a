"""What the probe learns of a pipeline's call, and what it refuses, on pipelines of a few lines."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from diffusers.guiders import AdaptiveProjectedGuidance
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Condition
from unified_trainer.models.pipeline.calls import Pipeline, ProbeError
from unified_trainer.models.pipeline.codec import PipelineCodec
from unified_trainer.models.pipeline.facts import Facts
from unified_trainer.models.pipeline.guidance import Rule
from unified_trainer.models.pipeline.known import Known
from unified_trainer.models.pipeline.latents import KNOWN
from unified_trainer.models.pipeline.model import PipelineModel
from unified_trainer.models.pipeline.opening import component_class
from unified_trainer.models.pipeline.probe import learn
from unified_trainer.models.pipeline.values import flat, made_of, nested
from unified_trainer.models.pipeline.without_memory import WithoutMemory

SIZE = (1, 16, 24)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor, time: Tensor, text: Any = None, more: Any = None, other: Any = None) -> tuple[Tensor]:
        if isinstance(other, str):
            assert len(x) == 1
        for block in self.blocks:
            block(x.flatten(2).mT if x.dim() > 3 else x)
        return (0.5 * x,)


class Decoder(nn.Module):
    def decode(self, z: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        return (z.repeat_interleave(8, -1).repeat_interleave(8, -2)[:, :3],)


def words(prompts: list[str], long: int = 12) -> Tensor:
    """A row of numbers for each letter, as many as the longest prompt has, up to `long`."""
    most = min(long, max(map(len, prompts)))
    rows = torch.zeros(len(prompts), most, 2)
    for row, prompt in zip(rows, prompts, strict=True):
        letters = torch.tensor([ord(letter) for letter in prompt[:most]]).float()
        row[: len(letters)] = letters[:, None]
    return rows


class Stub:
    """A pipeline whose network is also given what `given` returns for prompts and solver step."""

    def __init__(self, given: Any) -> None:
        self.given, self.scheduler = given, FlowMatchEulerDiscreteScheduler()
        self.transformer, self.vae = Network(), Decoder()
        self.components = {"transformer": self.transformer, "vae": self.vae}

    def __call__(
        self,
        prompt: Any,
        height: int,
        width: int,
        num_images_per_prompt: int = 1,
        num_inference_steps: int = 4,
        generator: Any = None,
        output_type: str = "pil",
    ) -> None:
        prompts = [
            one for one in ([prompt] if isinstance(prompt, str) else prompt) for _ in range(num_images_per_prompt)
        ]
        self.run(prompts, height, width, num_inference_steps, generator, output_type)

    def run(self, prompts: Any, height: int, width: int, steps: int, generator: Any, output_type: str) -> None:
        x = torch.randn(len(prompts), 4, height // 8, width // 8, generator=generator)
        self.scheduler.set_timesteps(steps)
        for place, t in enumerate(self.scheduler.timesteps):
            v = self.transformer(x, t.expand(len(x)), **self.given(prompts, place))[0]
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        if output_type != "latent":
            self.vae.decode(2 * x + 1, return_dict=False)


class OneAtATime(Stub):
    def __call__(
        self,
        prompt: str,
        height: int,
        width: int,
        num_inference_steps: int = 4,
        generator: Any = None,
        output_type: str = "pil",
    ) -> None:
        assert isinstance(prompt, str)
        self.run([prompt], height, width, num_inference_steps, generator, output_type)


class Controlled(Stub):
    """Needs a control image, which is None by default; `into` says where it goes."""

    into = "other"

    def __call__(
        self,
        prompt: Any,
        height: int,
        width: int,
        control_image: Any = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int = 4,
        generator: Any = None,
        output_type: str = "pil",
    ) -> None:
        color = torch.tensor(control_image.getpixel((0, 0))).float()
        prompts = [
            one for one in ([prompt] if isinstance(prompt, str) else prompt) for _ in range(num_images_per_prompt)
        ]
        x = torch.randn(len(prompts), 4, height // 8, width // 8, generator=generator)
        if self.into == "latents":
            x[:, 0] = color[0] / 255
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            other = color.expand(len(x), 3) if self.into == "other" else None
            text = words(prompts, 4) + (color.mean() if self.into == "text" else 0)
            v = self.transformer(x, t.expand(len(x)), text, other=other)[0]
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        if output_type != "latent":
            self.vae.decode(x, return_dict=False)


class FromImage(Stub):
    """Gives its network tokens, of which those of the first frame are the image's and have the time 0."""

    cut = True  # whether the solver steps the other frames alone, or all, before the first is put back
    after = 1.0  # factor of the first frame before it is decoded

    def __call__(
        self,
        prompt: str,
        image: Any,
        height: int,
        width: int,
        num_frames: int,
        num_inference_steps: int = 4,
        generator: Any = None,
        output_type: str = "pil",
    ) -> None:
        places = torch.arange(height * width // 64).reshape(1, 1, 1, height // 8, width // 8)
        first = image.getpixel((0, 0))[0] / 255 + torch.arange(4).reshape(1, 4, 1, 1, 1) + places / 7
        x = torch.randn(1, 4, num_frames, height // 8, width // 8, generator=generator)
        moving = (torch.arange(num_frames) > 0).repeat_interleave(places.numel())
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            x = torch.cat([first, x[:, :, 1:]], 2)
            tokens = x.flatten(2).mT
            v = self.transformer(tokens, t * moving[None], words([prompt], 4))[0].mT.reshape(x.shape)
            begin = int(self.cut)
            moved = self.scheduler.step(v[:, :, begin:], t, x[:, :, begin:], return_dict=False)[0]
            x = torch.cat([x[:, :, :begin], moved], 2)
        if output_type != "latent":
            x = torch.cat([self.after * first, x[:, :, 1:]], 2)
            self.vae.decode(2 * x + 1, return_dict=False)


class SoundNetwork(Network):
    def forward(self, x: Tensor, time: Tensor, sigma: Tensor, text: Any, sound: Tensor) -> tuple[Tensor, Tensor]:
        return *super().forward(x, time), -0.5 * sound


class WithSound(Stub):
    """Moves a sound too, by a copy of its scheduler: two channels as tokens, which its VAE has as rows."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.transformer = SoundNetwork()
        self.components |= {"transformer": self.transformer, "audio_vae": Decoder()}

    def run(self, prompts: Any, height: int, width: int, steps: int, generator: Any, output_type: str) -> None:
        x = torch.randn(len(prompts), 4, height // 8, width // 8, generator=generator)
        sound, of_sound = torch.randn(len(prompts), 3, 2, generator=generator), copy.deepcopy(self.scheduler)
        for scheduler in (self.scheduler, of_sound):
            scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps:
            times = t.expand(len(x))
            v, heard = self.transformer(x, times, times / 1000, words(prompts), sound)
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
            sound = of_sound.step(-heard, t, sound, return_dict=False)[0]
        if output_type != "latent":
            self.vae.decode(2 * x + 1, return_dict=False)
            self.components["audio_vae"].decode(3 * sound.mT[..., None] - 1)


def pipeline(given: Any, kind: type[Stub] = Stub, memory: WithoutMemory | None = None) -> Pipeline:
    return Pipeline(Path("folder"), kind(given), ["transformer"], memory or WithoutMemory())


def learned(given: Any, kind: type[Stub] = Stub) -> Facts:
    return learn(pipeline(given, kind), SIZE)


def test_an_argument_with_rows_is_the_prompts_and_the_vaes_affine_map_is_read() -> None:
    facts = learned(lambda prompts, step: {"text": words(prompts, 4), "more": torch.ones(len(prompts), 2), "other": 3})
    assert facts.arguments.text.keys() == {"text"} and facts.arguments.text["text"].shape == (4, 2)
    assert facts.arguments.replicated == ("more",) and facts.arguments.constants["other"] == 3
    assert float(facts.latents.scale.max()) == 2 and float(facts.latents.shift.max()) == 1
    assert facts.arguments.counted is None and not facts.arguments.paired


def test_parts_of_dicts_and_layers_of_features_are_arguments_of_their_own() -> None:
    facts = learned(
        lambda prompts, step: {
            "text": [words(prompts, 4), 2 * words(prompts, 4)],
            "more": {"sums": words(prompts, 4)[:, 2]},
        }
    )
    assert facts.arguments.text.keys() == {"text/0", "text/1", "more/sums"}
    held = {"a": {"b": {"c": 1}, "d": 2}, "e": [torch.ones(2, 3, 4)] * 11, "f": [torch.ones(3, 4)], "g": {}}
    apart = flat(held, 2)
    assert {"a/b/c", "a/d", "e/10", "f", "g"} <= apart.keys()
    back = nested(apart)
    assert back["a"] == held["a"] and back["f"] is held["f"] and back["g"] == {} and len(back["e"]) == 11


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda prompts, step: {"text": words(prompts, 4), "other": step}, "changes other from step to step"),
        (
            lambda prompts, step: {"text": words(prompts, 4), "other": len(prompts[0])},
            "other, which follows from the sam",
        ),
        (
            lambda prompts, step: {"text": words(prompts, 4), "more": {"a": prompts[0]}},
            "more/a, which follows from the",
        ),
    ],
)
def test_what_is_neither_a_row_nor_constant_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(ProbeError, match=said):
        learned(given)


def test_a_constant_that_another_network_makes_is_refused() -> None:
    memory = WithoutMemory()
    vae = memory.prepare(nn.Linear(2, 2, device="meta"))
    probed = pipeline(lambda prompts, step: {"text": words(prompts, 4), "other": vae(torch.zeros(3, 2))}, memory=memory)
    probed.pipe.components["encoder"] = vae
    with pytest.raises(ProbeError, match="makes other by another network"):
        learn(probed, SIZE)


def test_padded_prompts_need_a_mask_or_are_encoded_and_called_alone() -> None:
    def bare(prompts: list[str], step: int) -> dict[str, Any]:
        return {"text": words(prompts), "other": torch.arange(words(prompts).shape[1])}

    def masked(prompts: list[str], step: int) -> dict[str, Any]:
        return {"text": words(prompts), "more": (words(prompts)[:, :, 0] > 0).int()}

    alone = learned(bare)
    assert alone.arguments.counted == ("other",) and not alone.arguments.paired and alone.arguments.text["text"].listed
    assert len(alone.arguments.constants["other"]) == 12
    assert learned(masked).arguments.paired and learned(masked).arguments.counted is None


def test_a_pipeline_of_one_sample_at_a_time_has_rows_where_its_network_takes_two() -> None:
    facts = learned(lambda prompts, step: {"text": words(prompts, 4), "more": torch.ones(1, 2)}, OneAtATime)
    assert facts.arguments.text.keys() == {"text"} and facts.arguments.replicated == ("more",)
    with pytest.raises(ProbeError, match="makes one sample at a time"):
        learned(lambda prompts, step: {"text": words(prompts, 4), "other": "single"}, OneAtATime)


def test_an_image_that_the_call_needs_is_found_and_may_not_go_into_the_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Known(Path("folder"))
    held.pipeline = pipeline(None, Controlled)
    assert not held.pipeline.takes_image
    assert held.of_size(SIZE).arguments.images.keys() == {"other"} and held.pipeline.takes_image
    monkeypatch.setattr(Controlled, "into", "latents")
    with pytest.raises(ProbeError, match="writes its image into the noisy latents"):
        learn(held.pipeline, SIZE)
    monkeypatch.setattr(Controlled, "into", "text")
    facts = learn(held.pipeline, SIZE)
    assert facts.arguments.joint and facts.arguments.text.keys() == {"text"} and not facts.arguments.images
    assert "prompt with its image: text" in str(facts)
    monkeypatch.setattr(Controlled, "into", "nothing")
    with pytest.raises(ProbeError, match="no argument that follows from the image"):
        learn(held.pipeline, SIZE)


@pytest.mark.parametrize("first", [True, False])
def test_tokens_of_the_sample_are_found_beside_those_of_the_text(first: bool) -> None:
    class Joint(Network):
        def forward(self, x: Tensor, time: Tensor, text: Tensor) -> tuple[Tensor]:
            parts = [x.flatten(2).mT, text.repeat(1, 1, 2)]
            tokens = torch.cat(parts if first else parts[::-1], dim=1)
            for block in self.blocks:
                block(tokens)
            return (0.5 * x,)

    probed = pipeline(lambda prompts, step: {"text": words(prompts, 4)})
    probed.pipe.transformer = probed.pipe.components["transformer"] = Joint()
    found = learn(probed, SIZE).tokens
    assert (found.first, found.count, found.channels) == (first, 6, 4)
    rows = torch.arange(13.0).reshape(1, 13, 1)  # another text has seven rows
    assert found.of(rows).flatten().tolist() == [*(range(6) if first else range(7, 13))]


@pytest.mark.parametrize("cut", [True, False])
def test_a_first_frame_that_follows_from_the_image_is_clean(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    monkeypatch.setattr(FromImage, "cut", cut)
    probed = pipeline(None, FromImage)
    facts = learn(probed, (3, 16, 24))
    assert facts.latents.known == 1 and facts.arguments.images.keys() == {KNOWN}
    assert facts.arguments.images[KNOWN].shape == (4, 1, 2, 3)
    order = torch.arange(72).reshape(18, 4).T.flatten()
    assert torch.equal(facts.latents.order, order) and facts.latents.shape == (4, 3, 2, 3)
    assert facts.times[0].at(torch.tensor([0.5, 0.25])).tolist() == [[0.0] * 6 + [s] * 12 for s in (500, 250)]
    network = Network()
    network.forward = lambda x, time, text: (x + time[..., None],)
    held = Known(Path("folder"))
    held.pipeline, held._facts = probed, {facts.size: facts}
    model = PipelineModel(network, None, held)
    x_t, known, sigma = torch.randn(2, 4, 3, 2, 3), torch.randn(2, 4, 1, 2, 3), torch.tensor([0.5, 0.25])
    v = model.velocity(x_t, sigma, Condition({"text": torch.zeros(2, 4, 2), KNOWN: known}))
    torch.testing.assert_close(x_t[:, :, :1] - v[:, :, :1] * sigma.view(2, 1, 1, 1, 1), known)
    torch.testing.assert_close(v[:, :, 1:], x_t[:, :, 1:] + 1000 * sigma.view(2, 1, 1, 1, 1))


def test_a_first_frame_that_is_changed_before_decoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromImage, "after", 1.5)
    with pytest.raises(ProbeError, match="changes the latents of its image before it decodes them"):
        learn(pipeline(None, FromImage), (3, 16, 24))


def test_a_prompt_that_changes_a_constant_is_refused() -> None:
    def given(prompts: list[str], step: int) -> dict[str, Any]:
        return {"text": words(prompts, 4), "more": torch.ones(len(prompts), 2), "other": "!" in prompts[0]}

    probed = pipeline(given)
    facts = learn(probed, SIZE)
    codec = SimpleNamespace(folder=Path("folder"))

    def check(prompt: str) -> None:
        inputs = probed.call([prompt], SIZE, None, stop=True).inputs[0]
        PipelineCodec._check_constants(codec, facts, facts.latents.apart(inputs), prompt)

    check("a dog")
    check("a longer prompt")
    with pytest.raises(UserError, match="makes other of prompt 'stop!'"):
        check("stop!")


def test_what_a_network_makes_is_found_in_every_form_that_it_has():
    x = torch.ones(2, 3)
    for output in (x, (x, None), Transformer2DModelOutput(sample=x)):
        assert made_of(output) is x
    assert made_of([x]) == [x]


@pytest.mark.parametrize("longest", [0.5, 15.0])
@pytest.mark.parametrize("eta", [1.0, 0.2])
def test_projected_guidance_is_that_of_diffusers(longest: float, eta: float) -> None:
    cond, uncond = torch.randn(2, 2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    guider = AdaptiveProjectedGuidance(3.0, adaptive_projected_guidance_rescale=longest, eta=eta)
    latents = learned(lambda prompts, step: {"text": words(prompts, 4)}).latents
    ours = Rule("projected", eta=eta, longest=longest).guided(cond, uncond, 3.0, latents)
    torch.testing.assert_close(ours, guider.forward(cond, uncond).pred)


def test_classes_are_found_without_a_list_of_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing those of transformers takes most of a second, for each component of a folder."""

    def listed(_module: object) -> list[str]:
        raise AssertionError

    monkeypatch.setattr(type(transformers), "__dir__", listed)
    file = Path("model_index.json")
    assert component_class(file, "transformers", "T5EncoderModel") is transformers.T5EncoderModel
    assert component_class(file, "diffusers", "AutoencoderKL") is AutoencoderKL
    with pytest.raises(UserError, match=r"transformers\.NoSuchModel is no class of diffusers .* or transformers"):
        component_class(file, "transformers", "NoSuchModel")


def test_a_sound_that_a_copy_of_the_scheduler_moves_is_learned():
    facts = learn(pipeline(None, WithSound), SIZE)
    assert "latents: x [4, 2, 3] and sound [3, 2] of its sound; time: time = 1000 sigma, sigma = 1 sigma;" in str(facts)
    sound, tokens = facts.sound, torch.randn(2, 3, 2)
    assert (sound.sign, sound.output, facts.sign) == (-1.0, None, 1.0)
    assert facts.arguments.of_pass == {"time", "sigma", "sound"} and facts.arguments.text.keys() == {"text"}
    ours = sound.latents.ours(tokens)
    assert ours.shape == (2, 2, 1, 3, 1) and torch.equal(sound.latents.packed(ours), tokens)
    assert torch.equal(sound.latents.raw(ours), 3 * tokens.mT[:, :, None, :, None] - 1)
    assert facts.shape == (4, 2, 2, 3)  # 24 numbers of the video, 6 of the sound, and a rest
    whole = torch.randn(2, *facts.shape)
    assert torch.equal(sound.parts(whole).video, whole.flatten(1)[:, :24].reshape(2, 4, 1, 2, 3))
    assert torch.equal(sound.joined(sound.parts(whole)), whole)
