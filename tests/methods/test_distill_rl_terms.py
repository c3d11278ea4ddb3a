"""The discriminator as a term of distill_rl."""

from dataclasses import replace

import torch
from helpers import dmd2, random_clips
from test_distill_rl import (
    LAST,
    ONE,
    assert_equal_gradients,
    losses,
    step_with_exit,
    trainer,
)

from unified_trainer.methods.distill_rl_settings import GANTermConfig
from unified_trainer.methods.dmd2 import DMD2Config


def test_matching_with_a_discriminator_is_dmd2_bit_for_bit():
    one, step = trainer(matching=ONE, gan=GANTermConfig(weight=0.5, critic_weight=0.1)), step_with_exit(LAST)
    settings = DMD2Config(
        batch_size=4,
        micro_batch=4,
        guidance_scale=2.0,
        student_every=1,
        critic_samples="shared",
        gan_weight=0.5,
        gan_critic_weight=0.1,
    )
    other = dmd2(settings)
    assert one.method.config.needs_clips
    heads = [role.roles["critic"]._heads[""] for role in (one, other)]
    heads[0].load_state_dict(heads[1].state_dict())  # its weights are not zero
    batch = replace(one.loader.batch(step), latents=random_clips(8).latents([0, 1, 2, 3]))
    found, expected = losses(one, step, batch), losses(other, step, batch)
    for role in ("student", "critic"):
        (own,), (theirs,) = found[role], expected[role]
        assert torch.equal(own.value, theirs.value)
        assert all(torch.equal(own.metrics[key], value) for key, value in theirs.metrics.items())
    assert_equal_gradients(one.roles["critic"], other.roles["critic"])
    assert_equal_gradients(one.roles["student"], other.roles["student"])
