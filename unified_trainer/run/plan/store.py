"""The bytes that Ray's object store holds at a time for the workers of a run, by settings and configs of models."""

import math

from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.run.plan.plan import RunPlan
from unified_trainer.run.plan.roles import weight_shapes


def store_bytes(plan: RunPlan) -> int:
    """Return the bytes of samples and weights of all training steps under way, and of one validation.

    Samples are float32 states and ends. Scores, log-densities and videos are small beside them and are left out.
    """
    run, config = plan.run, plan.run.rollouts
    steps, total = config.ahead + config.super_batch, 0
    if config.workers and isinstance(run.algorithm, RolloutConfig):
        samples = plan.batch.prompts * plan.batch.num_samples
        states = max(1, run.algorithm.kept_states(run.sampler))
        total += 4 * steps * samples * states * math.prod(plan.latent_shape)
    sent = [(plan.method.sampled_by or "student", steps * bool(config.workers))]
    sent += [("student", int(bool(config.evaluation_workers)))]
    for name, versions in sent if config.transport == "object_store" else ():
        if versions:
            role = plan.roles[name]
            size = 2 if role.config.precision == "bf16" and role.own_adapter is None else 4
            total += versions * size * sum(map(math.prod, weight_shapes(name, role).values()))
    return total
