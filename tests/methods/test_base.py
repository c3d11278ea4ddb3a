"""The declaration of a method: a wrong one is an error when its class is made, and names file and line."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from helpers import ALONE, CAPTIONS, LATENT_SHAPE, WAN, Recorder, frozen, tiny_codec, trainable

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import load_object
from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import Loader
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.base import (
    DeclarationError,
    Loss,
    Method,
    MethodConfig,
    SingleUpdateConfig,
    initial_copy,
    trained,
    updated_copy,
)
from unified_trainer.methods.base import frozen as declare_frozen
from unified_trainer.roles.role import RoleConfig, TrainableConfig
from unified_trainer.run.plan.roles import plan_roles
from unified_trainer.run.registry import METHODS, method_named
from unified_trainer.run.settings import config as settings
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig


@dataclasses.dataclass(frozen=True)
class Settings(SingleUpdateConfig):
    batch_size: int = 2
    """Samples."""
    micro_batch: int = 2
    """Samples."""
    weight: float = 1.0
    """A weight."""


def step(self, batch, step, rng, mesh):
    yield Loss("student", torch.zeros((), requires_grad=True))


@dataclasses.dataclass(frozen=True)
class RolloutSettings(Settings):
    rollout_batch: int = 2
    """Samples."""


def sample(config, sampler, role, batch, step, rng):
    """One that makes no samples."""


GOOD = {"config_class": Settings, "roles": {"student": trained()}, "step": step}
SAMPLED = {
    "config_class": RolloutSettings,
    "sampled_by": "student",
    "uses_reward": True,
    "sample": staticmethod(sample),
}


def constructor(self, config, sampler, *, student, teacher):
    """One that asks for a teacher."""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"config_class": MethodConfig}, "must set config_class to a frozen dataclass"),
        ({"config_class": dict}, "must set config_class to a frozen dataclass"),
        ({"config_class": type("Bare", (MethodConfig,), {})}, "must set config_class to a frozen dataclass"),
        ({"roles": {}}, "must declare its roles"),
        ({"roles": {"teacher": declare_frozen()}}, 'must declare a trained role "student"'),
        ({"roles": {"student": declare_frozen()}}, 'must declare a trained role "student"'),
        ({"roles": {"other": trained(), "student": trained()}}, 'must declare "student" first'),
        ({"roles": {"student": trained(), "second": TrainableConfig}}, "declares role second as"),
        ({"roles": {"student": trained(), "reward": declare_frozen()}}, "cannot call a role 'reward'"),
        ({"roles": {"student": trained(), "a b": trained()}}, "cannot call a role 'a b'"),
        (
            {"roles": {"student": trained(), "critic": trained(starts_from="teacher")}},
            "starts from teacher, which is",
        ),
        (
            {"roles": {"student": trained(), "critic": trained(starts_from="teacher"), "teacher": declare_frozen()}},
            "critic starts from teacher: a role starts from one declared before it",
        ),
        ({"roles": {"student": trained(), "t": declare_frozen(), "c": updated_copy("t")}}, "which is not trained"),
        (SAMPLED | {"sampled_by": "teacher"}, "sets sampled_by: it must name one of its roles"),
        (SAMPLED | {"uses_reward": False}, "sets sampled_by: it must name one of its roles, set uses_reward"),
        (SAMPLED | {"sample": Method.sample}, "sets sampled_by: it must name one of its roles, set uses_reward, and"),
        (SAMPLED | {"config_class": Settings}, "sets sampled_by: its config_class needs a field rollout_batch"),
        ({"step": Method.step}, "must define step"),
        ({"__init__": constructor}, "has a constructor with config, sampler, student, teacher, but declares"),
    ],
)
def test_a_wrong_declaration_names_the_fault(changes, why):
    with pytest.raises(DeclarationError, match="method Wrong") as caught:
        type("Wrong", (Method,), GOOD | changes)
    assert why in str(caught.value)


def test_a_method_that_takes_samples_is_declared_with_its_settings():
    assert type("Right", (Method,), GOOD | SAMPLED).parts() == ("reward", "loader", "rollouts")


def test_a_wrong_declaration_names_file_and_line(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("from unified_trainer.methods.base import Method\n\n\nclass Wrong(Method):\n    pass\n")
    with pytest.raises(DeclarationError, match=r"wrong\.py:4: method Wrong must set config_class"):
        load_object(f"{file}:Wrong", "--method")


@pytest.mark.parametrize("name", ["data", "steps", "algorithm"])
def test_a_role_cannot_have_the_name_of_a_setting(name):
    method = type("Wrong", (Method,), GOOD | {"roles": {"student": trained(), name: trained()}})
    with pytest.raises(DeclarationError, match=f"method Wrong cannot call a role '{name}'"):
        settings.run_class(method)


def test_a_method_without_a_constructor_gets_its_roles_as_attributes():
    """Annotations are strings in this file; roles are found all the same, since they are declared."""

    class Plain(Method):
        config_class: ClassVar = Settings
        roles: ClassVar = {"student": trained(), "guide": declare_frozen(), "old": updated_copy("student")}
        step = step

    student, guide = trainable(), frozen("guide")
    method = Plain(Settings(), SamplerConfig(), student=student, guide=guide, old=None)
    assert (method.student, method.guide, method.old, method.config) == (student, guide, None, Settings())
    kinds = {name: spec.config_class for name, spec in Plain.roles.items()}
    assert kinds == {"student": TrainableConfig, "guide": RoleConfig, "old": None}


def test_the_settings_have_exactly_the_roles_of_the_method():
    for name in METHODS:
        method = method_named(name)
        own = settings.run_class(method)().roles
        assert list(own) == [role for role, spec in method.roles.items() if not spec.copy_of], name
    assert "teacher" not in settings.run_class(method_named("dance_grpo"))().roles


def test_a_role_takes_the_folder_of_the_role_it_starts_from():
    run = settings.run_class(method_named("dmd2"))()
    own, student = str(WAN), TrainableConfig(path="tiny")  # the same folder under two names
    run = dataclasses.replace(run, method="dmd2", student=student, teacher=RoleConfig(path=own, precision="bf16"))
    plans = plan_roles(run, method_named("dmd2"))
    assert {name: role.path for name, role in plans.items()} == {"student": "tiny", "teacher": own, "critic": own}
    assert plans["critic"].config.precision == "fp32"  # settings are its own, whatever it starts from


def test_a_role_that_the_settings_do_not_need_is_not_built():
    method = method_named("dance_grpo")
    run = settings.run_class(method)(method="dance_grpo", student=TrainableConfig(path="tiny"))
    assert list(plan_roles(run, method)) == ["student"]
    algorithm = dataclasses.replace(run.algorithm, kl_coefficient=0.1)
    assert list(plan_roles(dataclasses.replace(run, algorithm=algorithm), method)) == ["student", "reference"]
    assert initial_copy("student").when(run.algorithm)


class Remembering(Method):
    """A method with a state under torch's own names."""

    config_class = Settings
    roles: ClassVar = {"student": trained()}

    def __init__(self, config, sampler, *, student):
        self.config, self.student, self.seen = config, student, torch.zeros(2)

    def step(self, batch, step, rng, mesh):
        self.seen = self.seen + 1
        yield Loss("student", self.student.weights["proj_out.bias"].sum())

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"].clone()


def trainer_of(method: Method, student: Recorder) -> Trainer:
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), Settings().plan(), LATENT_SHAPE, "", 0, ALONE)
    return Trainer(method, {"student": student}, loader, ALONE, seed=0)


def test_a_methods_state_is_in_the_checkpoints():
    student = Recorder(moves=True)
    one = trainer_of(Remembering(Settings(), SamplerConfig(), student=student), student)
    one.step(0)
    assert torch.equal(one.tensors()["method/seen"], torch.ones(2))


def test_a_state_that_is_no_tensor_is_refused():
    student = Recorder()
    method = Remembering(Settings(), SamplerConfig(), student=student)
    method.seen = 3
    with pytest.raises(TypeError, match=r"Remembering\.state_dict: seen is a int, checkpoints hold tensors"):
        trainer_of(method, student).tensors()


def test_settings_without_a_plan_say_what_to_do():
    with pytest.raises(NotImplementedError, match="must define plan"):
        MethodConfig().plan()


def test_a_declaration_error_is_a_user_error():
    assert issubclass(DeclarationError, UserError)
