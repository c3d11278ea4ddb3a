"""What can be wrong with an input: the file, the field, a value that it must not have, and words of the message.

FIELDS: subject -> file -> (field, value, words) or (field, value, words, what else the message names).
The field "" is the whole file. The value ABSENT removes the field or file; a function spoils the file itself.
"""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from bad_inputs import ABSENT
from helpers import LATENT_SHAPE, rewrite

from unified_trainer.data.row_kinds import LATENT
from unified_trainer.rewards.hpsv3_folder import CHECKPOINT
from unified_trainer.tools.sample.rollout_folder import ABOUT

LONG = "x" * 300
NAN = float("nan")


def typed(name, kind):
    """Spoils a file of weights: one of them gets another type."""
    return lambda file: rewrite(file, lambda held: held.update({name: held[name].to(kind)}))


def parquet(values, *more):
    """Return a table of prompts, with further columns of the same name."""
    file = io.BytesIO()
    columns = [pa.array(values) if isinstance(values, list) else values, *more]
    pq.write_table(pa.table(columns, names=["prompt"] * len(columns)), file)
    return file.getvalue()


# Fields of JSON files.

WEIGHTS = "diffusion_pytorch_model.safetensors"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set a = namespace(b='x') %}{% for i in range(60) %}{% set a.b = a.b ~ a.b %}{% endfor %}"
MACROS = "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"
SOUND_TEMPLATE = "<|vision_start|><|image_pad|><|vision_end|>{{ messages[0]['content'][1]['text'] }}"
ROPE = "text_config.rope_parameters"

FIELDS = {
    "fields": {  # of a schema of every type
        "size.json": [
            ("width", ABSENT, "width is missing"),
            ("width", 0, "width must be greater than or equal to 1, not 0"),
            ("width", "1", "width must be a valid integer, not '1'"),
            ("width", 1.5, "width must be a valid integer, not 1.5"),
            ("width", True, "width must be a valid integer, not True"),
            ("width", None, "width must be a valid integer, not None"),
            ("scale", NAN, "scale must be a finite number"),
            ("", '{"width": 1, "scale": 1e999}', "scale must be a finite number"),
            ("scale", "1", "scale must be a valid number"),
            ("names", [], "names list must have at least 1 item"),
            ("names", "a", "names must be a valid list"),
            ("names", ["a", 2], "names.1 must be a valid string, not 2"),
            ("of", {"a": "3"}, "of.a must be a valid integer"),
            ("of", [3], "of must be a valid dictionary"),
            ("open", 1, "open must be a valid boolean"),
            ("open", "x" * 500, "xxx..."),
        ]
    },
    "model": {
        "model_index.json": [
            ("", "[]", "not a list"),
            ("", ABSENT, "is missing"),
            ("_class_name", ABSENT, "_class_name is missing"),
            ("_class_name", "NoPipeline", "NoPipeline is no pipeline of diffusers"),
            ("boundary_ratio", 0.9, "no transformer_2 is named"),
            ("boundary_ratio", 0, "boundary_ratio must be greater than 0"),
            ("boundary_ratio", 1.0, "boundary_ratio must be less than 1"),
            ("boundary_ratio", [0.9], "boundary_ratio must be a valid number"),
            ("transformer_2", [], "transformer_2 list must have at least 2 items"),
            ("transformer_2", ["diffusers", "Wan"], "config.json is missing", "transformer_2/config.json"),
        ],
        "transformer/config.json": [
            ("", "{", "is not JSON"),
            ("", ABSENT, "is missing"),
            ("_class_name", ABSENT, "_class_name is missing"),
            ("_class_name", "FluxTransformer2DModel", "_class_name must be 'WanTransformer3DModel'"),
            ("patch_size", ABSENT, "patch_size is missing"),
            ("patch_size", [1, 1], "patch_size list must have at least 3 items"),
            ("patch_size", [1, 1, 1, 1], "patch_size list must have at most 3 items"),
            ("patch_size", [1, 0, 1], "patch_size.1 must be greater than or equal to 1"),
            ("in_channels", ABSENT, "in_channels is missing"),
            ("in_channels", 36, "mismatched keys"),
            ("num_attention_heads", 0, "num_attention_heads must be greater"),
            ("attention_head_dim", 7, "attention_head_dim must be a multiple of 2"),
            ("num_layers", 0, "num_layers must be greater"),
            ("num_layers", 100_000, "num_layers must be less than or equal to 1000"),
            ("ffn_dim", 10**12, "ffn_dim must be less than"),
            ("freq_dim", 63, "freq_dim must be a multiple of 2"),
            ("eps", 0, "eps must be greater than 0"),
            ("qk_norm", "layer_norm", "qk_norm must be 'rms_norm_across_heads'"),
        ],
        "vae/config.json": [
            ("", "{}", "_class_name is missing"),
            ("", ABSENT, "is missing"),
            ("_class_name", "AutoencoderKL", "_class_name must be 'AutoencoderKLWan'"),
            ("z_dim", 8, "latents_mean must have a number for each of the 8 channels"),
            ("latents_mean", [0.5], "latents_mean must have a number for each of the 16 channels (z_dim), not 1"),
            ("latents_mean", [0.0] * 15 + [float("inf")], "latents_mean.15 must be a finite number"),
            ("latents_std", [1.0] * 15 + [0.0], "latents_std.15 must be greater than 0, not 0.0"),
            ("latents_std", [1.0] * 17, "latents_std must have a number for each of the 16 channels (z_dim), not 17"),
            ("in_channels", 4, "in_channels is 4, but by patches of 4 x 4 pixels it is 48"),
            ("scale_factor_temporal", 8, "scale_factor_temporal is 8, but by its layers"),
            ("scale_factor_spatial", 8, "scale_factor_spatial is 8, but by dim_mult"),
            ("temperal_downsample", [True], "temperal_downsample must have one value less than dim_mult"),
            ("dim_mult", [], "dim_mult list must have at least 1 item"),
        ],
        "text_encoder/config.json": [
            ("", "null", "not null"),
            ("model_type", "t5", "model_type must be 'umt5'"),
            ("model_type", ABSENT, "model_type is missing"),
            ("d_model", 64, "d_model is 64, but text_dim of transformer/config.json is 32"),
            ("dropout_rate", 1, "dropout_rate must be less than 1"),
        ],
        f"transformer/{WEIGHTS}": [
            ("", typed("proj_out.bias", torch.int64), "proj_out.bias has type I64"),
            ("", typed("proj_out.bias", torch.bool), "proj_out.bias has type BOOL"),
            ("", b"", "is damaged"),
            ("", bytes(8), "is damaged"),
            ("", b"\xff" * 64, "is damaged"),
        ],
        f"vae/{WEIGHTS}": [("", typed("quant_conv.bias", torch.complex64), "quant_conv.bias has type")],
        f"transformer/{WEIGHTS}.index.json": [
            ("", "{}", "weight_map is missing"),
            ("", '{"weight_map": {"a": "b.safetensors"}}', "names b.safetensors, which is not in this folder"),
            ("", '{"weight_map": {"a": "../vae/' + WEIGHTS + '"}}', "which is not in this folder"),
        ],
    },
    "codec": {
        "tokenizer/tokenizer.json": [
            ("", ABSENT, "holds none of tokenizer.json", "tokenizer"),
            ("", "", "tokenizer.json is empty"),
            ("", "{}", "no tokenizer can be made", "tokenizer"),
            ("", '{"model": {"type": "Nothing"}}', "no tokenizer can be made", "tokenizer"),
        ],
        "tokenizer/tokenizer_config.json": [
            ("", "[]", "not a list"),
            ("model_max_length", 0, "model_max_length must be greater than or equal to 1"),
        ],
    },
    "hpsv3": {
        "hpsv3.json": [
            ("", "[]", "not a list"),
            ("instruction", "Mark this picture", "instruction must hold the placeholder {text_prompt}"),
            ("instruction", "{}", "instruction must hold the placeholder"),
            ("instruction", "{text_prompt} {other}", "and no other one"),
            ("instruction", "{text_prompt.__class__}", "and no other one"),
            ("instruction", "{text_prompt!r}", "and no other one"),
            ("instruction", "{text_prompt:>9}", "and no other one"),
            ("instruction", "{text_prompt", "instruction is no text with a placeholder"),
            ("instruction", ABSENT, "instruction is missing"),
            ("prompt_with_special_token", "Mark:", "must hold <|Reward|> once"),
            ("prompt_with_special_token", "<|Reward|><|Reward|>", "must hold <|Reward|> once"),
            ("pixels", 0, "pixels must be greater than or equal to 784"),
        ],
        "preprocessor_config.json": [
            ("", "{}", "image_mean is missing"),
            ("image_mean", [0.5], "image_mean list must have at least 3 items"),
            ("image_std", [1, 1, 0], "image_std.2 must be greater than 0"),
        ],
        "config.json": [
            ("", "null", "not null"),
            ("model_type", "llama", "model_type must be 'qwen2_vl'"),
            ("image_token_id", -1, "image_token_id must be greater"),
            ("image_token_id", 355, "image_token_id is 355, and no token of 355"),
            ("text_config", ABSENT, "text_config is missing"),
            ("text_config.hidden_size", 81, "hidden_size is 81, and no multiple of the 4 heads"),
            ("text_config.num_key_value_heads", 3, "num_attention_heads is 4, and no multiple of the 3 heads"),
            ("text_config.num_hidden_layers", 100_000, "num_hidden_layers must be less than"),
            ("text_config.hidden_act", "wave", "hidden_act must be 'silu'"),
            (f"{ROPE}.mrope_section", [1, 1], "mrope_section list must have at least 3"),
            (f"{ROPE}.mrope_section", [4, 4, 4], "mrope_section sums to 12, expected 10"),
            (f"{ROPE}.rope_theta", 0, "rope_theta must be greater than or equal to 100"),
            ("vision_config.num_heads", 3, "embed_dim is 64, and no multiple of 4 x num_heads (3)"),
            ("vision_config.in_channels", 4, "in_channels must be 3"),
            ("vision_config.hidden_size", 64, "vision_config.hidden_size is 64"),
        ],
        "chat_template.json": [
            ("", "", "is empty"),
            ("chat_template", "{% for message in messages %}", "chat_template fails"),
            ("chat_template", "{% frobnicate %}", "unknown tag"),
            ("chat_template", "{{ messages | frobnicate }}", "frobnicate"),
            ("chat_template", "{{ messages[7].role }}", "chat_template fails"),
            ("chat_template", "{{ 1 / 0 }}", "division by zero"),
            ("chat_template", "{{ raise_exception('not this chat') }}", "not this chat"),
            ("chat_template", "{{ ''.__class__.__mro__ }}", "chat_template fails"),
            ("chat_template", "{{ messages.append(1) }}", "chat_template fails"),
            ("chat_template", "{% include 'config.json' %}", "chat_template fails"),
            ("chat_template", LOOP, "it takes more than 2 s"),
            ("chat_template", MACROS, "it takes more than 2 s"),
            ("chat_template", DOUBLED, "chat_template fails"),
            ("chat_template", "{{ '%10000000000d' % 1 }}", "chat_template fails"),
            ("chat_template", "{{ '{:>10000000000}'.format('x') }}", "chat_template fails"),
            ("chat_template", "{{ 'x'.center(3000000000) }}", "chat_template fails"),
            ("chat_template", "{{ 'x' | center(2000000) }}", "more than 1048576 characters"),
            ("chat_template", SOUND_TEMPLATE + SOUND_TEMPLATE, "does not write the text of a message once"),
            ("chat_template", SOUND_TEMPLATE.replace(" }}", "| trim }}"), "does not write the text of a message once"),
            ("chat_template", SOUND_TEMPLATE.replace(" }}", "| length }}"), "does not write the text"),
            ("chat_template", "{{ range(10 ** 10) }}", "chat_template fails"),
            ("chat_template", "{{ 'x' * 10000000000 }}", "chat_template fails"),
            ("chat_template", "", "chat_template string must have"),
            ("chat_template", "no image", "does not write the text of a message"),
            ("chat_template", SOUND_TEMPLATE + "<|image_pad|>", "2 image and 1 <|Reward|> tokens", ""),
        ],
        "tokenizer.json": [("", "{}", "", "")],
        CHECKPOINT: [("", typed("rm_head.0.bias", torch.int64), "rm_head.0.bias has type")],
    },
    "adapter": {
        "adapter_config.json": [
            ("", "[]", "not a list"),
            ("r", 0, "r must be greater"),
            ("r", 8, "has rank 3, but the adapter's settings say 8", ""),
            ("alpha_pattern", {"to_(q": 1.0}, "is no pattern of layers"),
        ],
        "adapter_model.safetensors": [
            (
                "",
                typed("base_model.model.blocks.0.attn1.to_q.lora_B.weight", torch.int64),
                "to_q.lora_B.weight has type",
            ),
        ],
    },
    "rollout": {
        ABOUT: [
            ("version", 99, "has version 99"),
            ("version", ABSENT, "has version None"),
            ("prompts", [], "prompts list must have at least 1 item"),
            ("num_samples", 0, "num_samples must be greater"),
            ("video.frames", ABSENT, "video.frames is missing"),
            ("base", ABSENT, "base is missing"),
        ]
    },
}


# Contents of whole files.

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)

CONTENTS = {
    "json": [
        ("a.json", " \n\t", "is empty"),
        ("a.json", "[]", "not a list"),
        ("a.json", '"a"', "not a text"),
        ("a.json", "3", "not a number"),
        ("a.json", "null", "not null"),
        ("a.json", "true", "not true or false"),
        ("a.json", '{"a": 1', "line 1"),
        ("a.json", "version https://git-lfs.github.com/spec/v1\n", "is not JSON"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ("a.json", "[" * 200_000, "nested too deeply"),
        ("a.json", b'{"a": "caf\xe9"}', "byte 11, in line 1, is 0xe9"),
        ("a.json", b'{"a":\n\n"\xff"}', "byte 9, in line 3, is 0xff"),
        ("a.json", "\ufeff{}", "byte order mark"),
    ],
    "yaml": [
        ("a.yaml", "# nothing\n", "is empty"),
        ("a.yaml", "- a\n", "not a list"),
        ("a.yaml", "null", "not null"),
        ("a.yaml", "a:\n\t- b", "line 2"),
        ("a.yaml", "a: [1, 2", "is not valid YAML"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "line 2"),
        ("a.yaml", "a: 1\0", "is not valid YAML"),
        ("a.yaml", b"a: caf\xe9\n", "byte 7, in line 1, is 0xe9"),
        ("a.yaml", "steps: 1\nsteps: 2\n", "the key steps stands there twice"),
        ("a.yaml", "a:\n  b: 1\n  b: 2\n", "line 3: the key b stands there twice"),
        ("a.yaml", "a: 1\nyes: 2\n", "line 2: the key 'yes' is no text"),
        ("a.yaml", "? [a]\n: b\n", "is no text"),
        ("a.yaml", "a: 2020-01-01\n", "line 1: '2020-01-01' is a timestamp"),
        ("a.yaml", "a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("a.yaml", "a: !!python/name:os.system ''\n", "line 1"),
        ("a.yaml", "a: !!int abc\n", "is not valid YAML"),
        ("a.yaml", "a: *b\n", "is not valid YAML"),
        ("a.yaml", "a: &a [*a]\n", "an alias refers to what it is in"),
        ("a.yaml", LAUGHS, "more than 10000 keys and values"),
        ("a.yaml", "a: [" + "1, " * 10_001 + "1]\n", "more than 10000 keys and values"),
        ("a.yaml", "#" * 2**20 + "\na: 1\n", "1.0 MiB"),
        ("a.yaml", "a: " + "[" * 900 + "]" * 900, "nested too deeply"),
        ("a.yaml", "[" * 100_000, "exceeded maximum nesting depth"),
    ],
    "recipe": [
        ("a.yaml", "base: [tiny]", "base must name another recipe"),
        ("a.yaml", "base: absent", "absent"),
        ("a.yaml", lambda file: file.write_text(f"base: {file}"), "base must name another recipe"),
        ("a.yaml", "common: [steps]", "common must hold keys and values"),
        ("a.yaml", "fits: tiny", "fits must hold keys and values"),
        ("a.yaml", "finetune: null", "finetune must hold keys and values"),
    ],
    "reward": [
        ("a.yaml", "common: {}", "section reward"),
        ("a.yaml", "reward: [clip]", "section reward"),
        ("a.yaml", "reward: {}", "names no scorer"),
        ("a.yaml", "reward: {weight: 2}", "names no scorer"),
        ("a.yaml", "reward: {wait: 2}", "wait"),
        ("a.yaml", "reward: {path: tiny, weight: heavy}", "weight"),
    ],
    "prompts": [
        ("a.txt", "\n \n\r\n\t\n", "is empty"),
        ("a.txt", "\ufeff\n", "is empty"),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", "is not UTF-8: byte 12, in line 3, is 0xe9"),
        ("a.txt", "one\nt\0wo\n", "line 2 holds a NUL"),
        ("a.txt", "one\n\0\0\0\n", "line 2 holds a NUL"),
        ("a.txt", "one\ntwo\n\u200b\n", "line 3 holds invisible characters alone"),
        ("a.txt", "one\n\u200d \u200c\u2060\n", "line 2 holds invisible characters alone"),
        ("a.txt", "one\n\ufeff\ufeff\n", "line 2 holds invisible characters alone"),
        ("a.txt", "one\n\x01\x02\n", "line 2 holds invisible characters alone"),
        ("a.txt", "\u202e\n", "line 1 holds invisible characters alone"),
        ("a.jsonl", '{"prompt": "a"}\nb\n', "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 must hold a JSON object, not a list"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"words": "b"}\n', "line 3 has no column prompt"),
        ("a.jsonl", '{"text": "a"}\n{"caption": "b"}\n', "line 2 has no column text, only caption"),
        ("a.jsonl", '{"prompt": null}\n', "line 1 holds None instead of a text"),
        ("a.jsonl", '{"prompt": ["a"]}\n', "line 1 holds ['a'] instead of a text"),
        ("a.jsonl", '{"prompt": "\\ud83d"}\n', "line 1 holds half of a surrogate pair"),
        ("a.jsonl", '{"prompt": "a\\u0000"}\n', "line 1 holds a NUL"),
        ("a.jsonl", '{"prompt": "\\u200b"}\n', "line 1 holds invisible characters alone"),
        ("a.jsonl", "[" * 100_000, "line 1 is nested too deeply"),
        ("a.jsonl", b'{"prompt": "caf\xe9"}\n', "byte 16, in line 1"),
        ("a.jsonl", "\n", "is empty"),
        ("a.csv", "", "is empty"),
        ("a.csv", "prompt\n", "is empty"),
        ("a.csv", "words\na\n", "row 1 has no column prompt"),
        ("a.csv", "prompt,prompt\na,b\n", "a column name stands twice"),
        ("a.csv", "path,prompt\na\n", "row 1 holds None"),
        ("a.csv", "prompt\na, b\n", "row 1 has more values than the first line has columns"),
        ("a.csv", 'prompt\n"a\n', "line 2"),
        ("a.csv", 'prompt\n"a"b\n', "line 2"),
        ("a.csv", "prompt\n" + "x" * 200_000, "field larger than field limit"),
        ("a.csv", "prompt\na\0\n", ""),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.parquet", b"", "cannot be read"),
        ("a.parquet", parquet([1, 2]), "row 1 holds 1 instead"),
        ("a.parquet", parquet([b"a", b"b"]), "instead of a text"),
        ("a.parquet", parquet([["a"], ["b"]]), "instead of a text"),
        ("a.parquet", parquet([None, None]), "row 1 holds None"),
        ("a.parquet", parquet(["a", None]), "row 2 holds None"),
        ("a.parquet", parquet(["a", "b\0"]), "row 2 holds a NUL"),
        ("a.parquet", parquet(pa.array([], pa.string())), "is empty"),
        (
            "a.parquet",
            parquet(pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())),
            "cannot be read",
        ),
        ("a.parquet", parquet(["a"], pa.array(["b"])), "has several columns prompt"),
        ("absent.txt", ABSENT, "no such file"),
        ("absent.csv", ABSENT, "no such file"),
        ("absent.parquet", ABSENT, "no such file"),
        (f"{LONG}.txt", ABSENT, "File name too long"),
        ("folder", lambda file: file.mkdir(), "it is a folder"),
    ],
    "videos": [
        ("clips.csv", "path,caption\n", "holds no videos"),
        ("clips.csv", "path\na.mp4\n", "no column caption"),
        ("clips.csv", "caption\na\n", "no column path"),
        ("clips.csv", b"path,caption\na.mp4,\xff\n", "is not UTF-8"),
    ],
    "clips": [
        ("a.parquet", b"", "is not whole parquet"),
        ("a.parquet", b"PAR1" + bytes(8) + b"PAR1", "is not whole parquet"),
        ("a.parquet", b"\x1f\x8b" + bytes(50), "is not whole parquet"),
        ("a.parquet", lambda file: file.mkdir(), ""),
    ],
}


# Columns of stored clips.

SHAPE = list(LATENT_SHAPE)
COLUMNS = [
    ({"caption": [1, 2, 3]}, "column caption holds int64, expected string"),
    ({"caption": [b"a", b"b", b"c"]}, "column caption holds binary, expected string"),
    ({"caption": pa.nulls(3)}, "column caption holds null, expected string"),
    ({"caption": ["a", None, "c"]}, "row 2 ('clip1') has no caption"),
    ({"caption": ["a", "b", " \t"]}, "row 3 ('clip2') has no caption"),
    ({"caption": ["a", "b\0", "c"]}, "row 2 ('clip1') has a caption that holds a NUL"),
    ({"caption": ["a", "\u200b", "c"]}, "row 2 ('clip1') has a caption that holds invisible"),
    ({"caption": None}, "columns caption are missing"),
    ({"id": None}, "columns id are missing"),
    ({"vae_latent_bytes": ["a", "b", "c"]}, "column vae_latent_bytes holds string"),
    ({"vae_latent_bytes": [b"", None, None]}, "vae_latent_bytes is null in 2 rows"),
    ({"vae_latent_shape": ["16,2,2,2"] * 3}, "column vae_latent_shape holds string"),
    ({"vae_latent_shape": [[16.0, 2.0, 2.0, 2.0]] * 3}, "column vae_latent_shape holds list"),
    ({"vae_latent_shape": [SHAPE, None, SHAPE]}, "row 2 ('clip1') has latents ()"),
    ({"vae_latent_shape": [SHAPE, SHAPE, [16, None, 2, 2]]}, "row 3 ('clip2') has latents"),
    ({"vae_latent_shape": [SHAPE, SHAPE, [16, 3, 2, 2]]}, "row 3 ('clip2') has latents (16, 3, 2, 2)"),
    ({"vae_latent_shape": [[-1, 2, 2, 2], SHAPE, SHAPE]}, "row 1 ('clip0') has latents (-1"),
    ({"vae_latent_shape": None}, "columns vae_latent_shape are missing"),
    ({"vae_latent_dtype": [32] * 3}, "column vae_latent_dtype holds int64"),
    *(
        ({f"{column}_dtype": ["float32", kind, "float32"]}, f"row 2 ('clip1') has {name} of type {kind}, not float16")
        for column, name in (("vae_latent", "latents"), ("text_embedding", "a text embedding"))
        for kind in ("complex64", "<U4", "int64", "object", "bfloat16", "", None)
    ),
    ({"text_embedding_shape": ["4,32"] * 3}, "column text_embedding_shape holds string"),
    (dict.fromkeys(LATENT), "captions without clips"),
    ({"trajectory_latents_bytes": [b"", b"", b""]}, "holds trajectories of a teacher"),
]


# Flags, what is spoilt in FOLDER, and words of the message.

STUDENT, REWARD = "--method dance_grpo --student.path FOLDER/wan", "--reward.path FOLDER/hpsv3"
FLAGS = [
    ("--config FOLDER/a.yaml", ("a.yaml", "", ""), "--config", "a.yaml is empty"),
    ("--config FOLDER", None, "--config", "it is a folder"),
    ("--recipe FOLDER/a.yaml", ("a.yaml", "", "[]"), "--recipe", "not a list"),
    *((f"--{flag} {LONG}", None, f"--{flag}", "File name too long") for flag in ("config", "prompts")),
    (f"--recipe {LONG}.yaml", None, "--recipe", "File name too long"),
    *((f"--{flag} {LONG}", None, LONG[:100], "File name too long") for flag in ("resume", "init-from", "output")),
    *((f"--{role}.path {LONG}", None, "File name too long") for role in ("student", "reward")),
    ("--prompts FOLDER/a.txt", ("a.txt", "", "a\n\u200b\n"), "a.txt: line 2 holds"),
    ("--prompts FOLDER/a.txt", ("a.txt", "", "[" * 100_000), "a.txt: line 1 has 100,000 characters"),
    (
        *("--prompts FOLDER/a.txt", ("a.txt", "", "a\nb <|image_pad|>\n"), "--prompts"),
        "a.txt: line 2 holds <|image_pad|>, a special token of the scorer hpsv3",
    ),
    (
        "--validation.prompts FOLDER/a.txt",
        ("a.txt", "", "<|Reward|>\n"),
        "--validation.prompts",
        "line 1 holds <|Reward|>",
    ),
    (
        "--method dance_grpo --student.path FOLDER/run",
        ("run/config.yaml", "", ""),
        "is a run: start trained roles from its weights",
        "export",
    ),
    (STUDENT, ("wan/model_index.json", "", "[]"), "model_index.json must hold a JSON object, not a list"),
    (STUDENT, ("wan/model_index.json", "boundary_ratio", "0.9"), "boundary_ratio must be a valid number, not '0.9'"),
    (STUDENT, ("wan/transformer/config.json", "_class_name", "Flux"), "_class_name must be 'WanTransformer3DModel'"),
    (STUDENT, ("wan/vae/config.json", "latents_std", [0.0] * 16), "latents_std.0 must be"),
    (REWARD, ("hpsv3/hpsv3.json", "instruction", "Mark it"), "instruction must hold the placeholder {text_prompt}"),
    (REWARD, ("hpsv3/chat_template.json", "chat_template", "{% for %}"), "chat_template fails"),
    (f"--method finetune --data.path {LONG}", None, LONG[:100], "File name too long"),
    ("--method finetune --data.path absent", None, "absent", "does not exist"),
    ("--method finetune --data.path absent.csv", None, "absent.csv", "no such file"),
    # Settings that are refused as a whole.
    ("--student.max-grad-norm -1", None, "student.max_grad_norm must be at least 0, not -1"),
    ("--method=", None, "--method needs a value"),
    ("--init-from=", None, "--init-from needs a value"),
    ("--allow student.learning_rate", None, "--allow student.learning_rate is for --resume"),
    (
        "--student.lr-schedule cosine --student.lr-decay-updates 0",
        *(None, "student.lr_schedule cosine needs student.lr_decay_updates"),
    ),
    ("--student.adapter.rank 2 --student.adapter.layers to_q to_q", None, "layers names to_q more than"),
]


# What a scorer may not give for two videos.

SCORES = [
    (None, "gave a NoneType"),
    (0.5, "gave scores of shape []"),
    ("good", "gave a str"),
    ([None, 1.0], "gave a list"),
    ({"score": [1.0, 2.0]}, "gave a dict"),
    ([1.0], "gave scores of shape [1]"),
    ([1.0, 2.0, 3.0], "gave scores of shape [3]"),
    ([[1.0], [2.0]], "gave scores of shape [2, 1]"),
    ([[1.0], [2.0, 3.0]], "gave a list"),
    ([1j, 2j], "gave scores of type complex64"),
    ([True, False], "gave scores of type bool"),
    ([0.0, NAN], "the score of sample 1 ('b') is not finite"),
    ([float("inf"), 0.0], "the score of sample 0 ('a') is not finite"),
    ((x for x in (1.0, 2.0)), "gave a generator"),
    (object(), "gave a object"),
]
