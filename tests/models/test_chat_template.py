"""Chat templates: the text around a prompt is what transformers writes, and no template sees a prompt."""

import json

import pytest
from helpers import HPSV3, REPO
from transformers import AutoTokenizer

from unified_trainer.basics.errors import UserError
from unified_trainer.models.chat_template import TEXT, check_bounds, fixed_chat

PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def around(template: str, **tokens: str) -> tuple[str, str]:
    return fixed_chat(template, json.dumps([{"role": "user", "content": TEXT}]), json.dumps(tokens), "here")


@pytest.mark.parametrize("folder", [HPSV3, REPO / "tests" / "golden" / "hpsv3" / "base"], ids=["tiny", "published"])
def test_the_chat_is_that_of_transformers(folder):
    tokenizer = AutoTokenizer.from_pretrained(HPSV3, local_files_only=True)
    template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": TEXT}]}]
    fixed = fixed_chat(template, json.dumps(turns), json.dumps(tokenizer.special_tokens_map), "here")
    for prompt in ("a red circle", " <b> {{ 1 }} \\ 'x' \"y\" \n\u00e9 ", ""):
        turns[0]["content"][1]["text"] = prompt
        written = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert prompt.join(fixed) == written


def test_special_tokens_are_known():
    assert around("{{ bos_token }}" + PLAIN + "{{ eos_token }}", bos_token="<s>", eos_token="</s>") == ("<s>", "</s>")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if 'prompt' in messages[0]['content'] %}x{% endif %}" + PLAIN, "once, as it is"),
        (PLAIN.replace("content'] ", "content'] | upper "), "once, as it is"),
        (PLAIN * 2, "once, as it is"),
        ("{{ raise_exception('no\nsystem') }}", "chat_template fails"),
        ("{{ cycler.__init__.__globals__ }}", "chat_template fails"),
        ("{{ lipsum(n=200000) }}" + PLAIN, "chat_template fails"),
        ("{{ 'x' | indent(4000000000) }}" + PLAIN, "chat_template fails"),
        ("{{ messages | tojson(indent=4000000000) }}" + PLAIN, "chat_template fails"),
    ],
)
def test_a_template_that_does_something_else_is_one_sentence(template, said):
    with pytest.raises(UserError, match=f"here: .*{said}") as caught:
        around(template)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10 ** 7 }}",
        "{% for i in range(10 ** 4) %}{% for j in range(10 ** 4) %}{% if i * j %}{% endif %}{% endfor %}{% endfor %}",
        "{% set x = 'x' * 10 ** 10 %}",
    ],
)
def test_templates_of_pipelines_are_bounded(template):
    with pytest.raises(UserError, match="folder/tokenizer: chat_template takes too much time or memory"):
        check_bounds(template, "folder/tokenizer")


@pytest.mark.slow
def test_templates_that_need_other_turns_pass():
    check_bounds("{{ raise_exception('no system turn') }}", "folder/tokenizer")
    check_bounds("{% for m in messages %}{{ m['content'] }}{% endfor %}", "folder/tokenizer")
