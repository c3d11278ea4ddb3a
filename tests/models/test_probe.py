"""What the probe learns of a pipeline's call, and what it refuses, on pipelines of a few lines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.models.pipeline.calls import Pipeline, ProbeError, made_of
from unified_trainer.models.pipeline.codec import PipelineCodec
from unified_trainer.models.pipeline.facts import Facts, flat, nested
from unified_trainer.models.pipeline.known import Known
from unified_trainer.models.pipeline.probe import learn
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
            block(x.flatten(2).mT)
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
            v = self.transformer(x, t.expand(len(x)), words(prompts, 4), other=other)[0]
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        if output_type != "latent":
            self.vae.decode(x, return_dict=False)


def pipeline(given: Any, kind: type[Stub] = Stub, memory: WithoutMemory | None = None) -> Pipeline:
    return Pipeline(Path("folder"), kind(given), ["transformer"], memory or WithoutMemory())


def learned(given: Any, kind: type[Stub] = Stub) -> Facts:
    return learn(pipeline(given, kind), SIZE)


def test_an_argument_with_rows_is_the_prompts_and_the_vaes_affine_map_is_read() -> None:
    facts = learned(lambda prompts, step: {"text": words(prompts, 4), "more": torch.ones(len(prompts), 2), "other": 3})
    assert facts.text.keys() == {"text"} and facts.text["text"].shape == (4, 2)
    assert facts.replicated == ("more",) and facts.constants["other"] == 3
    assert float(facts.scale.max()) == 2 and float(facts.shift.max()) == 1
    assert facts.counted is None and not facts.paired


def test_parts_of_dicts_and_layers_of_features_are_arguments_of_their_own() -> None:
    facts = learned(
        lambda prompts, step: {
            "text": [words(prompts, 4), 2 * words(prompts, 4)],
            "more": {"sums": words(prompts, 4)[:, 2]},
        }
    )
    assert facts.text.keys() == {"text/0", "text/1", "more/sums"}
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
    assert alone.counted == ("other",) and not alone.paired and alone.text["text"].listed
    assert len(alone.constants["other"]) == 12
    assert learned(masked).paired and learned(masked).counted is None


def test_a_pipeline_of_one_sample_at_a_time_has_rows_where_its_network_takes_two() -> None:
    facts = learned(lambda prompts, step: {"text": words(prompts, 4), "more": torch.ones(1, 2)}, OneAtATime)
    assert facts.text.keys() == {"text"} and facts.replicated == ("more",)
    with pytest.raises(ProbeError, match="makes one sample at a time"):
        learned(lambda prompts, step: {"text": words(prompts, 4), "other": "single"}, OneAtATime)


def test_an_image_that_the_call_needs_is_found_and_may_not_go_into_the_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Known(Path("folder"))
    held.pipeline = pipeline(None, Controlled)
    assert not held.pipeline.takes_image
    assert held.of_size(SIZE).images.keys() == {"other"} and held.pipeline.takes_image
    monkeypatch.setattr(Controlled, "into", "latents")
    with pytest.raises(ProbeError, match="writes its image into the noisy latents"):
        learn(held.pipeline, SIZE)
    monkeypatch.setattr(Controlled, "into", "nothing")
    with pytest.raises(ProbeError, match="no argument that follows from the image"):
        learn(held.pipeline, SIZE)


def test_a_prompt_that_changes_a_constant_is_refused() -> None:
    def given(prompts: list[str], step: int) -> dict[str, Any]:
        return {"text": words(prompts, 4), "more": torch.ones(len(prompts), 2), "other": "!" in prompts[0]}

    probed = pipeline(given)
    facts = learn(probed, SIZE)
    codec = SimpleNamespace(_facts=facts, folder=Path("folder"))
    for prompt in ("a dog", "a longer prompt"):
        PipelineCodec._check_constants(codec, probed.call([prompt], SIZE, None, stop=True).inputs[0], prompt)
    with pytest.raises(UserError, match="makes other of prompt 'stop!'"):
        PipelineCodec._check_constants(codec, probed.call(["stop!"], SIZE, None, stop=True).inputs[0], "stop!")


def test_what_a_network_makes_is_found_in_every_form_that_it_has():
    x = torch.ones(2, 3)
    for output in (x, (x, None), Transformer2DModelOutput(sample=x)):
        assert made_of(output) is x
    assert made_of([x]) == [x]
