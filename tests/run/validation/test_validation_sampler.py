"""Validations with a sampler and a size of their own: what is trained stays, and what is shown is another run's."""

import av
import pytest
from helpers import ALONE, SMALL, assert_same, checkpoint_of, metrics_of, run

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.sampling.solver import SamplerConfig
from unified_trainer.tools.plan.estimate import estimate

SHOWN = ["--validate-every", "1", "--validation.num-videos", "1", "--validation.batch", "2"]
OWN = ["--validation.sampler.num-steps", "5", "--validation.sampler.shift", "2", "--validation.sampler.solver", "sde"]
OWN += ["--validation.sampler.guidance-scale", "2.5", "--validation.height", "64", "--validation.frames", "9"]


def shown_of(folder) -> list[dict[str, float]]:
    rows = metrics_of(folder)
    return [{key: value for key, value in row.items() if key.startswith("validation/")} for row in rows]


@pytest.mark.slow
def test_training_stays_and_validations_are_those_of_a_run_with_that_sampler(tmp_path):
    """The validation of step 0 is that of a run whose own sampler and size these are."""
    run("dance_grpo", tmp_path / "plain", *SHOWN)
    run("dance_grpo", tmp_path / "own", *SHOWN, *OWN)
    as_trained = [word.replace("--validation.sampler.", "--sampler.") for word in OWN]
    as_trained = [word.replace("--validation.", "--video.") for word in as_trained]
    run("dance_grpo", tmp_path / "trained", *SHOWN, *as_trained)
    assert_same(*(checkpoint_of(tmp_path / name, 1) for name in ("own", "plain")))
    first = {name: next(row for row in shown_of(tmp_path / name) if row) for name in ("own", "plain", "trained")}
    assert first["own"] == first["trained"] != first["plain"] and len(first["own"]) > 5
    with av.open(str(tmp_path / "own/validation/step_1/0.mp4")) as file:
        stream = file.streams.video[0]
        assert (stream.frames, stream.height, stream.width) == (9, 64, 32)


@pytest.mark.slow
def test_they_may_change_when_a_run_is_resumed(tmp_path):
    run("dance_grpo", tmp_path / "run", *SHOWN)
    assert main(["--resume", str(tmp_path / "run"), "--steps", "2", *OWN]) == 0
    with av.open(str(tmp_path / "run/validation/step_2/0.mp4")) as file:
        assert file.streams.video[0].height == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], SamplerConfig(num_steps=4, step_sigmas=(1.0, 0.8, 0.5, 0.2), shift=3.0)),
        (["num-steps", "9"], SamplerConfig(num_steps=9, shift=3.0)),
        (["step-sigmas", "1", "0.5"], SamplerConfig(num_steps=2, step_sigmas=(1.0, 0.5), shift=3.0)),
        (["guidance-scale", "4", "3"], SamplerConfig(4, (1.0, 0.8, 0.5, 0.2), 3.0, guidance_scale=(4.0, 3.0))),
    ],
)
def test_what_is_not_given_is_the_runs(own, expected):
    words = [*SMALL["dance_grpo"], "--sampler.step-sigmas", "1", "0.8", "0.5", "0.2", "--sampler.guidance-scale", "3"]
    words += ["--sampler.shift", "3"]
    words += [f"--validation.sampler.{own[0]}", *own[1:]] if own else []
    assert parse(words).validated().sampler == expected
    assert parse(words).validated() is not parse(words) and (bool(own) or parse(words).validated() == parse(words))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            ["sampler.num-steps", "3", "--validation.sampler.step-sigmas", "1", "0.5"],
            r"validation\.sampler\.step_sigmas",
        ),
        (["sampler.guidance-scale", "1", "2", "3"], "takes one or two numbers"),
        (["height", "40"], r"height must be a multiple of"),
    ],
)
def test_what_cannot_be_is_refused_before_training(own, message):
    with pytest.raises(UserError, match=message):
        check(parse([*SMALL["dance_grpo"], "--validate-every", "1", f"--validation.{own[0]}", *own[1:]]), ALONE)


@pytest.mark.slow
def test_the_plan_counts_validations_at_their_size():
    words = ["--recipe", "tiny", "--method", "dance_grpo", "--reward.no-offload", "--video.frames", "5"]
    small, large = (
        estimate(parse([*words, *own]), 1)
        for own in ([], ["--validation.frames", "17", "--validation.height", "128", "--validation.width", "128"])
    )
    phases = [one.memory.total("validation") - sum(one.memory.always.values()) for one in (small, large)]
    assert phases[1] > 3 * phases[0]
    assert small.model_flops == large.model_flops
    assert {k: v for k, v in small.memory.phases.items() if k != "validation"} == {
        k: v for k, v in large.memory.phases.items() if k != "validation"
    }
