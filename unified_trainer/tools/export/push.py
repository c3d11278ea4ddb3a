"""The command push: it uploads an export, with its model card, to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import tyro
from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.utils import HFValidationError, httpx, validate_repo_id

from unified_trainer.basics.errors import UserError, writing
from unified_trainer.basics.terminal import say
from unified_trainer.run.checkpoint.manifest import Spec, find
from unified_trainer.tools.export.export import ABOUT, export
from unified_trainer.tools.output_folder import scratch_folder


class PushError(UserError, ConnectionError):
    """The upload to the hub failed; the message holds the hub's answer."""


def push(
    source: Annotated[str, tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional],
    private: bool = False,
    revision: str = "main",
) -> None:
    """Upload an export to the Hugging Face hub as one commit, and print its address.

    The token is that of `hf auth login`, or HF_TOKEN.

    Args:
        source: Folder that `export` wrote, or RUN[@step][:ema], which is first exported with the defaults of `export`.
        name: OWNER/NAME of the model on the hub; it is created if it does not exist.
        private: Make a new model private.
        revision: Branch to commit to; it is created if it does not exist.
    """
    token = get_token()
    if token is None:
        raise UserError("push needs a token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"push: {name!r} cannot be a name on the hub: {error}") from error
    if "/" not in name:
        raise UserError(f"push needs OWNER/NAME, such as my-team/{name}, not {name!r}")
    api = HfApi(token=token)
    if (Path(source) / ABOUT).is_file():
        commit = _upload(api, Path(source), name, private, revision)
    else:
        commit = _export_and_upload(api, source, name, private, revision)
    say(f"{source} is on the hub: {commit.commit_url}")


def _export_and_upload(api: HfApi, run: str, name: str, private: bool, revision: str) -> CommitInfo:
    find(run)
    name_of_folder = name.rpartition("/")[2]
    with writing(Spec.of(run).run), scratch_folder(Spec.of(run).run, "push", name_of_folder) as scratch:
        folder = scratch / name_of_folder
        export(run, folder)
        return _upload(api, folder, name, private, revision)


def _upload(api: HfApi, folder: Path, name: str, private: bool, revision: str) -> CommitInfo:
    try:
        api.create_repo(name, private=private or None, exist_ok=True)  # None: an organization's own default
        if revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        message = f"Export of {folder.name}"
        return api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message=message)
    except httpx.HTTPError as error:
        raise PushError(f"push to {name}: {' '.join(str(error).split())}") from error
