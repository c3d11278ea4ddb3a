"""Bad HPSv3 folders and bad scorers: each is one error of one line with file and field."""

import pytest
import torch
from bad_inputs import ABSENT, edit, refused
from helpers import CPU, HPSV3, copy_of, rewrite

from unified_trainer.rewards.chat_template import STEPS
from unified_trainer.rewards.hpsv3 import HPSv3
from unified_trainer.rewards.hpsv3_folder import CHECKPOINT
from unified_trainer.rewards.reward import RewardConfig, VideoReward
from unified_trainer.rewards.scorers import _plain


@pytest.fixture
def folder(tmp_path):
    return copy_of(HPSV3, tmp_path / "hpsv3")


def load(folder):
    return HPSv3.load(folder, CPU, torch.float32)


TEMPLATE = "chat_template.json", "chat_template"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MACROS = "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"
SOUND = "<|vision_start|><|image_pad|><|vision_end|>{{ messages[0]['content'][1]['text'] }}"
FIELDS = [
    ("hpsv3.json", "instruction", "Mark this picture", "instruction must hold the placeholder {text_prompt}"),
    ("hpsv3.json", "instruction", "", "instruction must hold the placeholder"),
    ("hpsv3.json", "instruction", "{}", "instruction must hold the placeholder"),
    ("hpsv3.json", "instruction", "{text_prompt} {other}", "and no other one"),
    ("hpsv3.json", "instruction", "{text_prompt.__class__}", "and no other one"),
    ("hpsv3.json", "instruction", "{text_prompt!r}", "and no other one"),
    ("hpsv3.json", "instruction", "{text_prompt:>9}", "and no other one"),
    ("hpsv3.json", "instruction", "{text_prompt", "instruction is no text with a placeholder"),
    ("hpsv3.json", "instruction", "{text_prompt}}", "instruction is no text with a placeholder"),
    ("hpsv3.json", "instruction", None, "instruction must be a valid string"),
    ("hpsv3.json", "instruction", ABSENT, "instruction is missing"),
    ("hpsv3.json", "prompt_with_special_token", "Mark:", "must hold <|Reward|> once"),
    ("hpsv3.json", "prompt_with_special_token", "<|Reward|><|Reward|>", "must hold <|Reward|> once"),
    ("hpsv3.json", "prompt_with_special_token", ["<|Reward|>"], "must be a valid string"),
    ("hpsv3.json", "pixels", 0, "pixels must be greater than or equal to 784"),
    ("hpsv3.json", "pixels", "12544", "pixels must be a valid integer"),
    ("hpsv3.json", "pixels", 10**12, "pixels must be less than"),
    ("preprocessor_config.json", "image_mean", [0.5], "image_mean list must have at least 3 items"),
    ("preprocessor_config.json", "image_mean", 0.5, "image_mean must be a valid list"),
    ("preprocessor_config.json", "image_mean", [0.5, None, 0.5], "image_mean.1 must be a valid number"),
    ("preprocessor_config.json", "image_std", [1, 1, 0], "image_std.2 must be greater than 0"),
    ("preprocessor_config.json", "image_std", [1, 1, float("nan")], "image_std.2 must be a finite number"),
    ("preprocessor_config.json", "image_std", ABSENT, "image_std is missing"),
    ("config.json", "model_type", "llama", "model_type must be 'qwen2_vl'"),
    ("config.json", "image_token_id", -1, "image_token_id must be greater"),
    ("config.json", "image_token_id", 355, "image_token_id is 355, and no token of 355"),
    ("config.json", "image_token_id", "352", "image_token_id must be a valid integer"),
    ("config.json", "text_config", ABSENT, "text_config is missing"),
    ("config.json", "text_config", [], "text_config must be"),
    ("config.json", "text_config.hidden_size", 81, "hidden_size is 81, and no multiple of the 4 heads"),
    ("config.json", "text_config.num_key_value_heads", 3, "num_attention_heads is 4, and no multiple of the 3 heads"),
    ("config.json", "text_config.num_key_value_heads", 0, "num_key_value_heads must be greater"),
    ("config.json", "text_config.num_hidden_layers", 100_000, "num_hidden_layers must be less than"),
    ("config.json", "text_config.hidden_act", "wave", "hidden_act must be 'silu'"),
    ("config.json", "text_config.rms_norm_eps", 0, "rms_norm_eps must be greater than 0"),
    ("config.json", "text_config.rope_parameters", None, "rope_parameters must be"),
    ("config.json", "text_config.rope_parameters.mrope_section", [1, 1], "mrope_section list must have at least 3"),
    ("config.json", "text_config.rope_parameters.mrope_section", [4, 4, 4], "mrope_section sums to 12, expected 10"),
    ("config.json", "text_config.rope_parameters.rope_theta", 0, "rope_theta must be greater than or equal to 100"),
    ("config.json", "vision_config.num_heads", 3, "embed_dim is 64, and no multiple of 4 x num_heads (3)"),
    ("config.json", "vision_config.patch_size", 0, "patch_size must be greater"),
    ("config.json", "vision_config.in_channels", 4, "in_channels must be 3"),
    ("config.json", "vision_config.hidden_size", 64, "vision_config.hidden_size is 64"),
    ("config.json", "vision_config.depth", None, "depth must be a valid integer"),
    (*TEMPLATE, "{% for message in messages %}", "chat_template fails"),
    (*TEMPLATE, "{{ messages", "chat_template fails"),
    (*TEMPLATE, "{% frobnicate %}", "unknown tag"),
    (*TEMPLATE, "{{ messages | frobnicate }}", "frobnicate"),
    (*TEMPLATE, "{{ messages[7].role }}", "chat_template fails"),
    (*TEMPLATE, "{{ 1 / 0 }}", "division by zero"),
    (*TEMPLATE, "{{ raise_exception('not this chat') }}", "not this chat"),
    (*TEMPLATE, "{{ ''.__class__.__mro__ }}", "chat_template fails"),
    (*TEMPLATE, "{{ messages.append(1) }}", "chat_template fails"),
    (*TEMPLATE, "{% include 'config.json' %}", "chat_template fails"),
    (*TEMPLATE, LOOP, f"more than {STEPS} steps"),
    (*TEMPLATE, MACROS, f"more than {STEPS} steps"),
    (*TEMPLATE, "{{ range(10 ** 10) }}", "chat_template fails"),
    (*TEMPLATE, "{{ 'x' * 10000000000 }}", "chat_template fails"),
    (*TEMPLATE, "", "chat_template string must have"),
    (*TEMPLATE, ["a"], "chat_template must be a valid string"),
    (*TEMPLATE, "no image", "0 image and 0 <|Reward|> tokens"),
    (*TEMPLATE, SOUND + "<|image_pad|>", "2 image and 1 <|Reward|> tokens"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "field", "value", "said"), FIELDS, ids=lambda x: str(x)[:30])
def test_fields(folder, name, field, value, said):
    edit(folder / name, field, value)
    whole = said.endswith("tokens")  # files that do not fit together
    refused(lambda: load(folder), str(folder if whole else folder / name), said)


def test_a_sound_template_is_taken(folder):
    edit(folder / TEMPLATE[0], TEMPLATE[1], SOUND)
    load(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "hpsv3.json", "chat_template.json", "preprocessor_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("content", ["", "[]", "{}", "null"])
def test_files_that_are_none(folder, name, content):
    (folder / name).write_text(content)
    refused(lambda: load(folder), str(folder))


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_weights_of_other_types(folder, kind):
    rewrite(folder / CHECKPOINT, lambda held: held.update({"rm_head.0.bias": held["rm_head.0.bias"].to(kind)}))
    refused(lambda: load(folder), f"{CHECKPOINT}: rm_head.0.bias has type")


VIDEO = torch.zeros(2, 3, 1, 4, 4)
GIVEN = {
    "None": (None, "gave a NoneType"),
    "a scalar": (0.5, "gave scores of shape []"),
    "a text": ("good", "gave a str"),
    "texts": (["good", "bad"], "gave a list"),
    "Nones": ([None, 1.0], "gave a list"),
    "a dict": ({"score": [1.0, 2.0]}, "gave a dict"),
    "one score": ([1.0], "gave scores of shape [1]"),
    "three scores": ([1.0, 2.0, 3.0], "gave scores of shape [3]"),
    "a column": ([[1.0], [2.0]], "gave scores of shape [2, 1]"),
    "unequal rows": ([[1.0], [2.0, 3.0]], "gave a list"),
    "complex numbers": (torch.ones(2, dtype=torch.complex64), "gave scores of type complex64"),
    "a list of complex numbers": ([1j, 2j], "gave scores of type complex64"),
    "truths": ([True, False], "gave scores of type bool"),
    "nan": ([0.0, float("nan")], "the score of sample 1 ('b') is not finite"),
    "inf": ([float("inf"), 0.0], "the score of sample 0 ('a') is not finite"),
    "a generator": ((x for x in (1.0, 2.0)), "gave a generator"),
    "an object": (object(), "gave a object"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_scores(case, unchecked):
    given, said = GIVEN[case]
    reward = VideoReward({"mine": _plain(lambda video, prompts: given)}, RewardConfig(kind="mine"))
    refused(lambda: reward.parts(VIDEO, ("a", "b"), ["mine"]), "reward: mine", said)
