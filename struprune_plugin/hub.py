"""Send an output to the Hub, when asked to by name. The token is huggingface_hub's own, and is shown nowhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_push(name: str) -> None:
    """Refuse, before any work, a name that is none, and a machine that cannot push.

    :raises ValueError: the same
    """
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode

    if not _NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ValueError(f"--push-to-hub: must be USER/NAME, got {name!r}. Give both parts.")
    if is_offline_mode():
        raise ValueError("--push-to-hub: must be left out while HF_HUB_OFFLINE is set, got it. Unset one of them.")
    if not get_token():
        raise ValueError(
            "--push-to-hub: must be given by who is logged in to the Hub, got no token. Run `hf auth login`."
        )


def push_folder(folder: Path, name: str) -> str:
    """Upload an output to a repository of the Hub, made private where there is none; return its address.

    :raises OSError: the Hub refuses or is not reached; the folder stays as it is
    """
    from huggingface_hub import HfApi, get_token

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model pruned with StruPrune")
    except Exception as error:  # whatever the Hub's client met on the way
        told = " ".join(str(error).split()).replace(get_token() or os.devnull, "…")
        failure = OSError(
            f"--push-to-hub: {name} must take the output, got: {told} {folder} is whole; try again with "
            f"`hf upload {name} {folder}`."
        )
        failure.errno = getattr(error, "errno", None) or 5
        raise failure from None
    return f"https://huggingface.co/{name}"
