"""Is a model folder complete? Configuration, tokenizer, and every shard of the index at its full size; nothing is loaded.

A safetensors file begins with the length of its header (8 bytes, little-endian), then the header (JSON: tensor → dtype,
shape, data_offsets); the largest end offset tells how long the file must be. So a cut file is found without reading it.
Not covered: the contents of weights (`weight_hashes` is for that) and formats other than safetensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import BadInput

GIB = 2**30
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
LFS_POINTER = re.compile(rb"version \S*git-lfs\S*")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk. `missing`: one phrase a fault; `revision`: the commit, tag or branch where the folder tells it; `bytes`: of the weights."""

    path: Path
    revision: str | None
    complete: bool
    missing: tuple[str, ...]
    source: str = "folder"
    bytes: int = 0

    @property
    def gib(self) -> float:
        """Size of the weight files in GiB."""
        return self.bytes / GIB


def check_folder(path: str | Path, weights: bool = True, source: str = "folder") -> ModelFolder:
    """Look through a model folder. Never raises for what is missing; `weights=False` leaves the weights out (dummy load)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return ModelFolder(folder, None, False, ("the folder itself" if not folder.exists() else "a folder (this is a file)",), source)
    missing = []
    config = _read_json(folder / "config.json", missing)
    if config is not None and not config.get("model_type"):
        missing.append("model_type in config.json")
    _read_json(folder / "tokenizer_config.json", missing)
    _look_for_tokenizer(folder, missing)
    if config and config.get("vision_config"):
        _read_json(folder / "preprocessor_config.json", missing)
    size = 0
    if weights:
        for name, expected in _weight_files(folder, missing).items():
            size += _check_shard(folder / name, expected, missing)
    return ModelFolder(folder, revision_of(folder), not missing, tuple(missing), source, size)


def require_folder(path: str | Path, weights: bool = True, source: str = "folder") -> ModelFolder:
    """`check_folder`, but an incomplete folder is BadInput that names what is missing."""
    found = check_folder(path, weights, source)
    if not found.path.is_dir():
        there = "is a file, not a model folder" if found.path.exists() else "does not exist"
        raise BadInput(f"{found.path} {there}: name a folder with config.json, tokenizer and weights, or a hub id")
    if not found.complete:
        more = f" and {len(found.missing) - 4} more" if len(found.missing) > 4 else ""
        raise BadInput(f"model folder {found.path} is incomplete, missing: {'; '.join(found.missing[:4])}{more}: fetch it again (what is there is kept), or name another folder")
    return found


def revision_of(folder: Path) -> str | None:
    """The revision that a folder tells of itself: the hubs' caches name it, a download into a folder notes it beside each file."""
    real = folder.resolve()
    if real.parent.name == "snapshots":
        return real.name
    for note in sorted((folder / ".cache" / "huggingface" / "download").glob("*.metadata")):
        commit = COMMIT.match(note.read_text(errors="replace"))
        if commit:
            return commit.group(0)
    return None


def weight_hashes(folder: str | Path) -> dict[str, str]:
    """sha256 of each weight file; the Hugging Face cache names its large files by it, others are read in full (about 1 GB/s)."""
    hashes = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        blob = file.resolve().name
        hashes[file.name] = blob if re.fullmatch(r"[0-9a-f]{64}", blob) else sha256(file)
    return hashes


def sha256(file: Path) -> str:
    """sha256 of a file's bytes."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _read_json(file: Path, missing: list[str]) -> dict | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(file.name)
        return None
    except (OSError, ValueError) as e:
        missing.append(f"{file.name} in readable form ({str(e)[:60]})")
        return None
    if not isinstance(value, dict):
        missing.append(f"{file.name} as a JSON object")
        return None
    return value


def _look_for_tokenizer(folder: Path, missing: list[str]) -> None:
    for names in TOKENIZERS:
        if all((folder / name).is_file() for name in names):
            missing += [f"{name} (it is a Git LFS pointer, the file itself was not fetched)" for name in names if _is_pointer(folder / name)]
            missing += [f"{name} (it is empty)" for name in names if (folder / name).stat().st_size == 0]
            return
    if not any(folder.glob("*.tiktoken")):
        missing.append("a tokenizer (tokenizer.json)")


def _weight_files(folder: Path, missing: list[str]) -> dict[str, set[str] | None]:
    """Weight file → tensors that the index places in it (None without an index)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = _read_json(index, missing)
        placed = content.get("weight_map") if content else None
        if content is not None and (not isinstance(placed, dict) or not placed):
            missing.append(f"weight_map in {index.name}")
        files: dict[str, set[str] | None] = {}
        for tensor, name in (placed or {}).items() if isinstance(placed, dict) else ():
            if Path(str(name)).name != name:  # an index must not lead out of the folder
                missing.append(f"a plain file name for {tensor} in {index.name}")
            else:
                files.setdefault(name, set()).add(tensor)
        return files
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    numbered = [name for name in found if re.search(r"-of-\d+\.safetensors$", name)]
    if numbered:
        missing.append(index.name)
    if not found:
        missing.append("weights (model.safetensors, or model.safetensors.index.json and its shards)")
    return dict.fromkeys(found)


def _check_shard(file: Path, expected: set[str] | None, missing: list[str]) -> int:
    """Size of a weight file in bytes; what is wrong with it goes to `missing`."""
    try:
        size = file.stat().st_size
    except OSError:
        missing.append(file.name)
        return 0
    if _is_pointer(file):
        missing.append(f"{file.name} (it is a Git LFS pointer, the file itself was not fetched)")
        return 0
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            missing.append(f"{file.name} in full ({size:,} bytes, cut inside its header)" if size else f"{file.name} (it is empty)")
            return size
        try:
            header = json.loads(f.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            missing.append(f"{file.name} in readable form (its safetensors header is damaged)")
            return size
    if size != 8 + length + end:
        word = "cut" if size < 8 + length + end else "too long"
        missing.append(f"{file.name} in full ({size:,} of {8 + length + end:,} bytes: {word})")
    lost = sorted((expected or set()) - set(header))
    if lost:
        missing.append(f"{len(lost)} tensors that the index places in {file.name} ({lost[0]}, ...)")
    return size


def _is_pointer(file: Path) -> bool:
    if file.stat().st_size > 1024:
        return False
    with open(file, "rb") as f:
        return bool(LFS_POINTER.match(f.read(200)))
