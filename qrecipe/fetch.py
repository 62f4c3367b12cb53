"""A model from the Hugging Face hub, from ModelScope or a folder: pinned to a revision, complete before it is served.

A folder is checked and used. A hub id is looked up in the caches first (no network), then fetched with the hub's own
client, which shows progress, retries, resumes and checks sizes; hashes are compared afterwards. A branch name ("main")
is resolved to the commit, which the result records: hand it back as `revision` to pin it.

Complete: configuration, tokenizer, every shard of the index at its full size. The header of a safetensors file says where
each tensor's bytes end, so a cut file is found without reading it; nothing is loaded, other formats are not covered.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import BadInput

SOURCES = {"huggingface": "HF_ENDPOINT", "modelscope": "MODELSCOPE_ENDPOINT"}  # each with its setting for a mirror
LEAVE_OUT = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "*.md", ".git*"]
ANSWER_S = 8.0  # seconds to wait for a hub to answer at all
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "merges.txt", "tokenizer.model", "*.tiktoken")


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk. `missing`: one phrase a fault; `revision`: commit, tag or branch where the folder tells it."""

    path: Path
    revision: str | None
    complete: bool
    missing: tuple[str, ...]
    gib: float = 0.0  # size of the weights


def check_folder(path: str | Path, weights: bool = True) -> ModelFolder:
    """Look through a model folder. Never raises for what is missing; `weights=False` leaves them out (dummy load)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return ModelFolder(folder, None, False, ("the folder" + " (this is a file)" * folder.exists(),))
    missing: list[str] = []
    config = _read_json(folder / "config.json", missing)
    if config is not None and not config.get("model_type"):
        missing.append("model_type in config.json")
    _read_json(folder / "tokenizer_config.json", missing)
    if config and config.get("vision_config"):
        _read_json(folder / "preprocessor_config.json", missing)
    _has_content(next((f for name in TOKENIZERS for f in folder.glob(name)), folder / TOKENIZERS[0]), missing)
    size = sum(_check_shard(folder / name, missing) for name in _shards(folder, missing)) if weights else 0
    return ModelFolder(folder, revision_of(folder), not missing, tuple(missing), size / 2**30)


def require_folder(path: str | Path, weights: bool = True) -> ModelFolder:
    """`check_folder`, but an incomplete folder is BadInput that names what is missing."""
    found = check_folder(path, weights)
    if not found.complete:
        named = "; ".join(found.missing[:5])
        raise BadInput(f"model folder {found.path} is incomplete, missing: {named}: fetch it again or name another one")
    return found


def revision_of(folder: Path) -> str | None:
    """The revision that a folder tells of itself: a hub's cache names it, a download to a folder notes it in .cache."""
    real = folder.resolve()
    if real.parent.name == "snapshots":
        return real.name
    notes = (note.read_text() for note in (folder / ".cache/huggingface/download").glob("*.metadata"))
    return next((commit.group(0) for note in notes if (commit := re.match(r"[0-9a-f]{40}", note))), None)


def _has_content(file: Path, missing: list[str]) -> bool:
    """The file is there, not empty and no Git LFS pointer; else it goes to `missing`."""
    start = b""
    with suppress(OSError), open(file, "rb") as f:
        start = f.read(100)
    if start and b"git-lfs" not in start:
        return True
    state = " (a Git LFS pointer)" if start else " (empty, or not readable)" if file.is_file() else ""
    missing.append(file.name + state)
    return False


def _read_json(file: Path, missing: list[str]) -> dict | None:
    """The JSON object in a file, None (and a word in `missing`) where there is none."""
    if _has_content(file, missing):
        with suppress(ValueError):
            if isinstance(value := json.loads(file.read_bytes()), dict):
                return value
        missing.append(f"{file.name} as a JSON object")
    return None


def _shards(folder: Path, missing: list[str]) -> list[str]:
    """Names of the weight files: those of the index where there is one."""
    if not (folder / INDEX).exists():
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        if not names or any("-of-" in name for name in names):
            missing.append(INDEX if names else f"weights (model.safetensors, or {INDEX} and its shards)")
        return names
    placed = (_read_json(folder / INDEX, missing) or {}).get("weight_map")
    if not placed or not isinstance(placed, dict):
        missing.append(f"weight_map in {INDEX}")
        return []
    return sorted({Path(str(name)).name for name in placed.values()})  # an index must not lead out of the folder


def _check_shard(file: Path, missing: list[str]) -> int:
    """Size of a weight file in bytes; what is wrong with it goes to `missing`."""
    from safetensors import SafetensorError, safe_open

    if not _has_content(file, missing):
        return 0
    size = file.stat().st_size
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as e:
        missing.append(f"{file.name} in full ({size:,} bytes are here; cut, too long or damaged: {e})")
    return size


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
