"""The sampler that --init-from brings: the student keeps what it fits, and each method rolls out as its recipe says."""

import dataclasses

import pytest

from unified_trainer.methods import METHODS
from unified_trainer.numerics.chunks import ROLLED_OUT, ChunkConfig
from unified_trainer.run.settings import command_line
from unified_trainer.run.settings.command_line import parse, replaced_by_checkpoint
from unified_trainer.run.settings.config import load_recipe, merged
from unified_trainer.sampling.solver import SamplerConfig

FEW = SamplerConfig(num_steps=3, shift=7.0, solver="sde", guidance_scale=1.0)
CAUSAL = dataclasses.replace(FEW, chunks=ChunkConfig(chunk_frames=5, independent_first_frame=True))
STREAMED = dataclasses.replace(CAUSAL, chunks=dataclasses.replace(CAUSAL.chunks, window_frames=30, sink_frames=10))
CHECKPOINTS = {"bidirectional": FEW, "causal": CAUSAL, "streamed": STREAMED}


def chunks_of(recipe: str, method: str) -> dict[str, object]:
    """What a recipe says of the chunks of a method."""
    sections = load_recipe(recipe)
    return merged(sections["common"], sections.get(method, {})).get("sampler", {}).get("chunks", {})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny", "wan2.1-1.3b"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_method_keeps_its_own_way_to_roll_out(monkeypatch, recipe, name):
    trained = CHECKPOINTS[name]
    monkeypatch.setattr(command_line, "trained_sampler", lambda spec: dataclasses.asdict(trained))
    for method in METHODS:
        own = chunks_of(recipe, method)
        got = parse(["--method", method, "--recipe", recipe, "--init-from", "RUN"]).sampler
        assert (got.num_steps, got.shift, got.solver, got.guidance_scale) == (3, 7.0, "sde", 1.0), method
        fits = trained.chunks if trained.chunks.causal else ChunkConfig(**own)
        assert got.chunks.chunk_frames == fits.chunk_frames, method
        assert got.chunks.independent_first_frame == fits.independent_first_frame, method
        says = bool(own.keys() & {*ROLLED_OUT})
        for key in ROLLED_OUT:
            expected = own.get(key, vars(ChunkConfig())[key]) if says else vars(trained.chunks)[key]
            assert vars(got.chunks)[key] == expected, (method, key)


def test_flags_override_both(monkeypatch):
    monkeypatch.setattr(command_line, "trained_sampler", lambda spec: dataclasses.asdict(STREAMED))
    flags = ["--sampler.num-steps", "2", "--sampler.chunks.window-frames", "20"]
    got = parse(["--method", "streaming_tuning", "--recipe", "wan2.1-1.3b", "--init-from", "RUN", *flags]).sampler
    assert (got.num_steps, got.chunks.window_frames, got.chunks.sink_frames) == (2, 20, 3)


def test_the_start_names_each_value_of_the_recipe_that_the_checkpoint_replaced(monkeypatch):
    monkeypatch.setattr(command_line, "trained_sampler", lambda spec: dataclasses.asdict(STREAMED))
    words = ["--method", "streaming_tuning", "--recipe", "wan2.1-1.3b", "--init-from", "RUN", "--sampler.shift", "2"]
    said = replaced_by_checkpoint(parse(words))
    assert said.startswith("--init-from RUN sets sampler.num_steps 3 (recipe: 4), sampler.negative_prompt ''")
    assert said.endswith(
        "sampler.chunks.chunk_frames 5 (recipe: 3), sampler.chunks.independent_first_frame True (recipe: False)"
    )
    assert "shift" not in said and "window" not in said
    assert replaced_by_checkpoint(parse(words[:4])) == ""
