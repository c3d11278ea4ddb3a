"""The command push: it uploads an export, with its model card, to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import tyro
from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import HFValidationError, httpx, validate_repo_id

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.terminal import say
from unified_trainer.tools.export.export import ABOUT


class PushError(UserError, ConnectionError):
    """The upload to the hub failed; the message holds the hub's answer."""


def push(
    export: Annotated[Path, tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional],
    private: bool = False,
    revision: str = "main",
) -> None:
    """Upload an export to the Hugging Face hub as one commit, and print its address.

    The token is that of `hf auth login`, or HF_TOKEN.

    Args:
        export: Folder that `export` wrote.
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
    if not (export / ABOUT).is_file():
        raise MissingFileError(f"push: {export / ABOUT} is missing; name a folder that `export` wrote")
    api, message = HfApi(token=token), f"Export of {export.name}"
    try:
        api.create_repo(name, private=private or None, exist_ok=True)  # None: an organization's own default
        if revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=export, revision=revision, commit_message=message)
    except httpx.HTTPError as error:
        raise PushError(f"push to {name}: {' '.join(str(error).split())}") from error
    say(f"{export} is on the hub: {commit.commit_url}")
