"""The command import-hpsv3: it writes the folder that the scorer hpsv3 reads, from its base model and checkpoint."""

import ast
import importlib.util
import json
import shutil
from pathlib import Path

from transformers import Qwen2Tokenizer, Qwen2VLConfig

from unified_trainer.basics.errors import MissingFileError, MissingPackageError, UserError
from unified_trainer.models import hub
from unified_trainer.models.folder import read_tokenizer
from unified_trainer.models.tensor_file import floating_shapes
from unified_trainer.rewards.hpsv3_folder import CHECKPOINT, REWARD_TOKEN, SETTINGS, base_config, check_folder
from unified_trainer.rewards.hpsv3_network import skeleton
from unified_trainer.rewards.hpsv3_preprocessing import Preprocessor
from unified_trainer.tools.output_folder import check_empty, link_or_copy, new_folder

PACKAGE = "hpsv3"
PROMPT_SOURCE = "dataset/data_collator_qwen.py"
PIXELS = 256 * 28 * 28  # the package's budget, both its minimum and its maximum
COPIED = ("preprocessor_config.json", "chat_template.json")
BASE, WEIGHTS = "Qwen/Qwen2-VL-7B-Instruct", "MizzenAI/HPSv3"  # hub ids
BASE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", *COPIED)


def import_hpsv3(out: Path, base: Path = Path(BASE), checkpoint: Path = Path(WEIGHTS)) -> None:
    """Make a folder for the HPSv3 reward from its checkpoint, its base model's files and the package's prompt strings.

    Args:
        out: Folder to write; it must be empty or absent.
        base: Folder or hub id of Qwen2-VL-7B-Instruct: config, tokenizer and processor; its weights are not read.
        checkpoint: Official HPSv3.safetensors, or hub id of a repository that holds it; it is hard-linked where
            possible, else copied.
    """
    check_empty(out)
    strings = package_strings()
    sources = {}
    if hub.is_hub_id(name := str(base)):
        base = hub.download(name, "--base", BASE_FILES)
        sources["base"] = hub.pinned(name, base)
    if hub.is_hub_id(name := str(checkpoint)):
        folder = hub.download(name, "--checkpoint", (CHECKPOINT,))
        sources["checkpoint"], checkpoint = hub.pinned(name, folder), folder / CHECKPOINT
    needed = [base / name for name in ("config.json", "tokenizer_config.json", *COPIED)] + [checkpoint]
    missing = [str(path) for path in needed if not path.is_file()]
    if missing:
        raise MissingFileError(f"import-hpsv3 needs {', '.join(missing)}; check --base and --checkpoint")
    tokenizer = read_tokenizer(Qwen2Tokenizer, base)
    tokenizer.add_special_tokens({"extra_special_tokens": [REWARD_TOKEN]}, replace_extra_special_tokens=False)
    config = checked_config(base, checkpoint, len(tokenizer))

    with new_folder(out) as folder:
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        for name in COPIED:
            shutil.copyfile(base / name, folder / name)
        settings = {
            "instruction": strings["INSTRUCTION"],
            "prompt_with_special_token": strings["prompt_with_special_token"],
            "pixels": PIXELS,
            **({"sources": sources} if sources else {}),
        }
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        link_or_copy(checkpoint, folder / CHECKPOINT)
        check_folder(folder)
        Preprocessor.load(folder, config)


def package_strings() -> dict[str, str]:
    """Read the package's prompt constants from its source: importing it fails with transformers 5."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(
            f"the package {PACKAGE} holds the prompt of the HPSv3 reward; run `pip install --no-deps hpsv3==1.0.0`"
        )
    source = Path(spec.submodule_search_locations[0]) / PROMPT_SOURCE
    wanted = ("INSTRUCTION", "prompt_with_special_token")
    strings = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in wanted
    }
    missing = [name for name in wanted if name not in strings]
    if missing:
        raise UserError(f"{source}: no {', '.join(missing)}; run `pip install --no-deps hpsv3==1.0.0`")
    return strings


def checked_config(base: Path, checkpoint: Path, tokens: int) -> Qwen2VLConfig:
    """Return the base's config with the checkpoint's number of embeddings; raise UserError unless the two fit."""
    config = base_config(base, floating_shapes(checkpoint), checkpoint)
    if tokens > config.text_config.vocab_size:
        raise UserError(
            f"{checkpoint} embeds {config.text_config.vocab_size} tokens but the tokenizer of {base} with "
            f"{REWARD_TOKEN} has {tokens}; use the base model that HPSv3 was trained from"
        )
    skeleton(config, base / "config.json", checkpoint)
    return config
