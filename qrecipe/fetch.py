"""A model from the Hugging Face hub, from ModelScope or a folder: pinned to a revision, complete before it is served.

A folder is checked and used. A hub id is looked up in the caches first (no network), then fetched with the hub's own
client, which shows progress, retries, resumes and checks sizes; hashes are compared afterwards. A branch name ("main")
is resolved to the commit, which the result records: hand it back as `revision` to pin it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from .errors import BadInput
from .model_folder import ModelFolder, check_folder, require_folder

SOURCES = {"huggingface": "HF_ENDPOINT", "modelscope": "MODELSCOPE_ENDPOINT"}  # each with its setting for a mirror
LEAVE_OUT = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "*.md", ".git*"]
ANSWER_S = 8.0  # seconds to wait for a hub to answer at all


def find_model(model: str, *, revision: str | None = None, source: str = "auto", weights: bool = True) -> ModelFolder:
    """The model's folder, complete. `model`: a folder or a hub id; `revision`: commit, tag or branch (default: main).

    source "auto" is ModelScope where VLLM_USE_MODELSCOPE is set (vLLM's own switch), else Hugging Face; both caches are
    looked at first; with HF_HUB_OFFLINE only there. BadInput: incomplete folder, unknown id or revision, no network.
    """
    if source not in ("auto", *SOURCES):
        raise BadInput(f"source {source!r} is not known: expected one of auto, {', '.join(SOURCES)}")
    text = str(model)
    if text.startswith((".", "/", "~")) or text and Path(text).exists():
        found = require_folder(text, weights)
        if revision and found.revision not in (None, revision):
            raise BadInput(f"folder {found.path} holds revision {found.revision}, not {revision}: name another folder")
        return found
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        raise BadInput(f"model {text!r} is neither a folder here nor a hub id OWNER/NAME, like Qwen/Qwen3.5-4B")
    import modelscope_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    switch = os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    order = list(SOURCES)[:: -1 if switch else 1] if source == "auto" else [source]
    for name in order:
        with suppress(OSError, ValueError, modelscope_hub.HubError):
            found = check_folder(_download(name, text, revision, weights, cached=True), weights)
            if found.complete and (found.revision or not revision):  # not an old cache that tells no revision
                return found
    if HF_HUB_OFFLINE:
        raise BadInput(f"{text} is not complete in the cache and HF_HUB_OFFLINE is set: unset it, or name a folder")
    return require_folder(_fetch(order[0], text, revision, weights), weights)


def _download(source: str, model: str, revision: str | None, weights: bool, cached: bool = False) -> Path:
    """The snapshot's folder by the hub's own client; `cached`: what the client's cache holds, without network."""
    skip = LEAVE_OUT if weights else [*LEAVE_OUT, "*.safetensors"]
    if source == "modelscope":
        from modelscope_hub import HubApi

        return HubApi().download_repo(model, "model", revision=revision, ignore_patterns=skip, local_files_only=cached)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, ignore_patterns=skip, local_files_only=cached))


def _fetch(source: str, model: str, revision: str | None, weights: bool) -> Path:
    """Download, and compare hashes (ModelScope's client does that by itself); the hub's failures become BadInput."""
    import httpx
    import modelscope_hub
    from huggingface_hub import HfApi, constants, errors

    endpoint = modelscope_hub.get_default_config().endpoint if source == "modelscope" else constants.ENDPOINT
    try:
        httpx.head(endpoint, timeout=ANSWER_S)  # a hub that swallows packets would hold its client for minutes
        path = _download(source, model, revision, weights)
        if source == "modelscope":
            return path
        for file in HfApi().verify_repo_checksums(model, revision=path.name, local_dir=path).mismatches:
            (path / file["path"]).resolve().unlink()
            spoilt = f"{file['path']} of {model} came with another {file['algorithm']} than the hub names"
            raise BadInput(f"{spoilt}, and was removed: fetch it again, or check the mirror set in HF_ENDPOINT")
        return path
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, modelscope_hub.NotExistError):
        asked = f"model {model}" + (f" with revision {revision!r}" if revision else "")
        mend = "check its page; where it is private or gated accept its terms there and set the hub's token"
        raise BadInput(f"{source} shows no {asked}: {mend}") from None
    except (httpx.HTTPError, modelscope_hub.HubError, OSError, ValueError) as e:
        reason = f"{type(e).__name__}: {str(e)[:120]}".splitlines()[0]
        mend = f"check network and disk and call again (what has come is kept), set a mirror in {SOURCES[source]}"
        raise BadInput(f"{model} cannot be fetched from {source} ({reason}): {mend}, or name a folder") from None
