"""A model from the Hugging Face hub, from ModelScope or from a folder: pinned to a revision, complete before it is served.

A folder is checked and used. A hub id is looked up in the caches first (no network), then fetched with the hub's own
client, which shows progress and resumes; sizes are checked by the client, sha256 hashes here where the hub names them. A
branch name ("main") is resolved to the commit, which the result records: hand that commit back as `revision` to pin it.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from fnmatch import fnmatch
from pathlib import Path

from .errors import BadInput
from .model_folder import GIB, ModelFolder, check_folder, require_folder, sha256

__all__ = ["ModelFolder", "check_folder", "find_model", "require_folder"]

SOURCES = ("auto", "huggingface", "modelscope")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LEAVE_OUT = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "*.md", ".git*"]
ANSWER_S = 8  # seconds to wait for a hub to answer at all
TRIES = 3  # rounds of Hugging Face's client, each of which retries by itself; ModelScope's one round takes half a minute


def find_model(model: str, *, revision: str | None = None, source: str = "auto", weights: bool = True) -> ModelFolder:
    """The model's folder, complete. `model`: a folder or a hub id; `revision`: commit, tag or branch (default: the hub's main branch).

    source "auto" is ModelScope where VLLM_USE_MODELSCOPE is set (vLLM's own switch), else Hugging Face; both caches are looked
    at first. Offline: HF_HUB_OFFLINE. Raises BadInput: incomplete folder, unknown id or revision, no network, no disk.
    """
    if source not in SOURCES:
        raise BadInput(f"source {source!r} is not known: expected one of {', '.join(SOURCES)}")
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise BadInput(f"model {model!r}: expected a folder or a hub id like Qwen/Qwen3.5-4B")
    text = str(model)
    if Path(text).expanduser().exists() or text.startswith((".", "/", "~")) or not HUB_ID.fullmatch(text):
        if not Path(text).expanduser().exists() and not text.startswith((".", "/", "~")):
            raise BadInput(f"model {text!r} is neither a folder here nor a hub id of the form OWNER/NAME, like Qwen/Qwen3.5-4B")
        found = require_folder(text, weights)
        if revision and found.revision and found.revision != revision:
            raise BadInput(f"folder {found.path} holds revision {found.revision}, asked for was {revision}: name the other folder, or leave the revision out")
        return found
    if source == "auto" and os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        source = "modelscope"
    for name in ("huggingface", "modelscope") if source == "auto" else (source,):
        found = _CACHED[name](text, revision, weights)
        if found:
            return found
    if _offline():
        raise BadInput(f"{text} is not (completely) in the cache and HF_HUB_OFFLINE forbids to fetch it: unset HF_HUB_OFFLINE, or give a folder that holds the model")
    name = "huggingface" if source == "auto" else source
    return _FETCH[name](text, revision, weights)


def _offline() -> bool:
    if any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return True
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _hf_cached(model: str, revision: str | None, weights: bool) -> ModelFolder | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = snapshot_download(model, revision=revision, local_files_only=True, ignore_patterns=_left_out(weights))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return None
    found = check_folder(path, weights, "huggingface cache")
    return found if found.complete else None


def _ms_cached(model: str, revision: str | None, weights: bool) -> ModelFolder | None:
    """ModelScope's cache by its layout: importing its client takes seconds."""
    cache = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()
    owner, name = model.split("/")
    places = [*cache.glob(f"models/{owner}--{name}/snapshots/{revision or '*'}")]
    if revision is None:
        places += [cache / "hub" / "models" / owner / name, cache / "models" / owner / name]  # layouts of older clients
    for place in places:
        if place.is_dir() and (found := check_folder(place, weights, "modelscope cache")).complete:
            return found
    return None


def _hf_fetch(model: str, revision: str | None, weights: bool) -> ModelFolder:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    _require_answer(constants.ENDPOINT, "the Hugging Face hub", model)
    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
    except GatedRepoError:
        raise BadInput(f"{model} is gated: accept its terms on its page, then set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise BadInput(f"{model} has no revision {revision!r}: give a commit, tag or branch of it") from None
    except RepositoryNotFoundError:
        raise BadInput(f"the hub knows no model {model!r} (or it is private): check the id, or set HF_TOKEN") from None
    except (HfHubHTTPError, OSError, ValueError, _httpx_error()) as e:
        raise _unreachable("the Hugging Face hub", model, e) from None
    left_out = _left_out(weights)
    files = {f.rfilename: f for f in info.siblings or [] if not any(fnmatch(f.rfilename, pattern) for pattern in left_out)}
    _require_disk(Path(constants.HF_HUB_CACHE), sum(f.size or 0 for f in files.values()), model)
    errors = (HfHubHTTPError, OSError, ValueError, _httpx_error())
    path = Path(_with_tries(lambda: snapshot_download(model, revision=revision, ignore_patterns=left_out), errors, model, TRIES))
    for name, file in files.items() if path.name == info.sha else ():  # not when the branch moved on meanwhile
        if file.lfs and file.lfs.sha256 and sha256(path / name) != file.lfs.sha256:
            (path / name).resolve().unlink()
            raise BadInput(f"{name} of {model} came with another sha256 than the hub names, and was removed: fetch it again, or check the mirror set in HF_ENDPOINT")
    return require_folder(path, weights, "huggingface")


def _ms_fetch(model: str, revision: str | None, weights: bool) -> ModelFolder:
    from modelscope_hub.config import get_default_config

    _require_answer(get_default_config().endpoint, "ModelScope", model)
    from modelscope import snapshot_download
    from modelscope_hub.errors import HubError
    from requests.exceptions import HTTPError

    def fetch() -> str:
        try:
            return snapshot_download(model, revision=revision, ignore_patterns=_left_out(weights))
        except HTTPError as e:
            if "404" in str(e):
                raise BadInput(f"ModelScope knows no model {model!r} with revision {revision or 'master'!r}: check both on its page") from None
            raise

    return require_folder(_with_tries(fetch, (OSError, HubError), model, 1), weights, "modelscope")


_CACHED = {"huggingface": _hf_cached, "modelscope": _ms_cached}
_FETCH = {"huggingface": _hf_fetch, "modelscope": _ms_fetch}


def _httpx_error() -> type[Exception]:
    import httpx

    return httpx.HTTPError


def _left_out(weights: bool) -> list[str]:
    return LEAVE_OUT if weights else [*LEAVE_OUT, "*.safetensors"]


def _with_tries(fetch, errors: tuple, model: str, tries: int) -> str:
    """Call the client until it ends well: what has come is kept, so that each round goes on where the last one broke off."""
    for left in range(tries - 1, -1, -1):
        try:
            return fetch()
        except errors as e:
            if isinstance(e, OSError) and e.errno in (28, 122):  # no space, over quota
                raise BadInput(f"the disk filled up while {model} was fetched: free some, then fetch again (what has come is kept)") from None
            if not left:
                raise BadInput(f"fetching {model} broke off ({type(e).__name__}: {str(e).splitlines()[0][:120]}): fetch again, it goes on from there; or give a folder that holds the model") from None


def _require_answer(endpoint: str, hub: str, model: str) -> None:
    """Ask once whether a hub answers, in bounded time: a resolver or a firewall that swallows packets would hold the client for minutes."""
    import httpx

    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            httpx.head(endpoint, timeout=ANSWER_S, follow_redirects=False)
            outcome.append(None)
        except Exception as e:
            outcome.append(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_S + 1)
    if not outcome or outcome[0] is not None:
        raise _unreachable(hub, model, outcome[0] if outcome else TimeoutError(f"no answer in {ANSWER_S} s"))


def _unreachable(hub: str, model: str, error: Exception) -> BadInput:
    reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
    other = "source='modelscope'" if "Hugging" in hub else "source='huggingface'"
    mirror = "a mirror of your own choice in HF_ENDPOINT" if "Hugging" in hub else "another endpoint in MODELSCOPE_ENDPOINT"
    return BadInput(f"{hub} cannot be reached for {model} ({reason}): check network and proxy, set {mirror}, take {other}, or give a folder that holds the model")


def _require_disk(cache: Path, needed: int, model: str) -> None:
    while not cache.exists():
        cache = cache.parent
    free = shutil.disk_usage(cache).free
    if free < needed + GIB // 2:
        raise BadInput(f"{model} takes {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free in {cache}: free some, or set HF_HOME to a folder on a larger disk")
