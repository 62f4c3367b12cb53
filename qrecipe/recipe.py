"""ServeRecipe: every `vllm serve` flag that the book uses, typed, with the environment that the engine wants."""

import json
import os
import shlex
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path

from .checks import check_number
from .errors import BadInput

SERVED_NAME = "qwen3.5-4b"
GPU_MODEL = "Qwen/Qwen3.5-4B"
NO_DOMAIN = "none.invalid"  # a name that cannot be resolved (RFC 2606): the server fetches no picture from anywhere
TEACHING = "teaching-model"  # the start of its folder's name
# A start of the teaching model is imports and tokenizer copies: share the tokenizer (plugin.py), and let the worker live
# in the engine core's process. vLLM then cannot bind OpenMP threads itself, so one thread is set here.
SHARE_TOKENIZER = {"QRECIPE_SHARE_TOKENIZER": "1"}
LEVERS = SHARE_TOKENIZER | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ServeRecipe:
    """One `vllm serve` command line.

    A flag left at None is not written, so vLLM's own default holds. Lengths are in tokens,
    `gpu_memory_utilization` is a share of the card's total memory, `env` is added to the environment.
    """

    model: str
    served_model_name: str = SERVED_NAME
    max_model_len: int | None = 32768
    gpu_memory_utilization: float | None = 0.90
    dtype: str | None = "bfloat16"
    host: str = "127.0.0.1"
    port: int = 8000
    reasoning_parser: str | None = "qwen3"
    revision: str | None = None
    load_format: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    distributed_executor_backend: str | None = None
    limit_mm_per_prompt: dict | None = None
    language_model_only: bool = False
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    allowed_media_domains: str | None = NO_DOMAIN
    trust_remote_code: bool = False
    extra: tuple[str, ...] = ()
    env: dict = field(default_factory=dict)

    def __post_init__(self):
        if not self.model or self.model.startswith("-"):  # a second option where a model stands
            raise BadInput(f"no model given ({self.model!r}): name a folder or a hub id")
        whole = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", *self.sizes()), (1, 10**8))
        whole |= {"port": (1024, 65535), "max_model_len": (16, 10**8)}
        for name, limits in whole.items():
            if (value := getattr(self, name)) is not None:
                check_number(value, name, *limits)
        if self.gpu_memory_utilization is not None:
            check_number(self.gpu_memory_utilization, "gpu_memory_utilization", 0.01, 1, float)

    def sizes(self) -> dict[str, int | None]:
        """Tensor-, pipeline- and data-parallel size by flag; their product is the number of ranks, one a card."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_parallel_size")}

    @property
    def ranks(self) -> int:
        return prod(size or 1 for size in self.sizes().values())

    def flags(self) -> list[tuple[str, str | None]]:
        """The flags in the order they are written: (name, value or None for a switch)."""
        out: list[tuple[str, str | None]] = []
        for f in fields(self):
            name, value = f.name.replace("_", "-"), getattr(self, f.name)
            if f.name == "enable_prefix_caching" and value is False:
                out.append((f"--no-{name}", None))
            elif f.name not in ("model", "extra", "env") and value not in (None, False):
                shown = json.dumps(value) if isinstance(value, dict) else str(value)
                out.append((f"--{name}", None if value is True else shown))
        return out

    def argv(self) -> list[str]:
        """The command as a list for a process; no shell reads it."""
        argv = ["vllm", "serve", self.model]
        for name, value in self.flags():
            argv += [name] if value is None else [name, value]
        return argv + list(self.extra)

    def command(self) -> str:
        """The command as one line to copy into a shell, environment first."""
        env = [f"{k}={shlex.quote(str(v))}" for k, v in self.env.items()]
        return " ".join([*env, shlex.join(self.argv())])

    def differences(self, other: "ServeRecipe") -> list[str]:
        """What differs in `other`, one phrase a flag, host and port included, the environment not."""
        mine, theirs = vars(self), vars(other)
        return [f"{k}: it has {mine[k]}, you ask for {theirs[k]}" for k in mine if k != "env" and mine[k] != theirs[k]]

    def with_(self, **changes) -> "ServeRecipe":
        """A copy with some flags changed."""
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, data: dict) -> "ServeRecipe":
        """The recipe from its JSON form; unknown keys are refused."""
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise BadInput(f"unknown serve flags {sorted(unknown)}: expected some of {[f.name for f in fields(cls)]}")
        return cls(**{**data, "extra": tuple(data.get("extra") or ())})


def bind_cores(ranks: int) -> str:
    """The cores of this process dealt out to `ranks` ranks of the CPU engine, as VLLM_CPU_OMP_THREADS_BIND has it: "0|1"."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise BadInput(
            f"{ranks} ranks are asked for, this machine has {len(cores)} cores and each rank needs one of its own: let tensor × pipeline × data be at most {len(cores)}"
        )
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(ranks))


def recipe_for(engine: str, model: str, *, port: int = 8000, weights: str = "real", **changes) -> ServeRecipe:
    """The book's recipe for an engine ("cpu" or "gpu").

    The CPU engine adds what two cores need: four sequences, no graph capture, no video, one GiB of KV cache. `changes`: other
    flags; an `env` among them is added to the engine's own.
    `$QRECIPE_SERVE_EXTRA` holds more words for the end of the command line, for what only this machine needs:
    QRECIPE_SERVE_EXTRA="--gdn-prefill-backend triton".
    """
    local = Path(model).is_dir()
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
    flags: dict = {"model": str(model), "port": port}
    if local:
        env["HF_HUB_OFFLINE"] = "1"
    if engine == "cpu":
        flags |= {"max_num_seqs": 4, "enforce_eager": True, "limit_mm_per_prompt": {"image": 4, "video": 0}}
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        sizes = [changes.get(f"{name}_parallel_size") or 1 for name in ("tensor", "pipeline", "data")]
        backend = changes.get("distributed_executor_backend") or ("uni" if sizes[0] * sizes[1] == 1 else "mp")
        if Path(model).name.startswith(TEACHING):
            env |= LEVERS if backend == "uni" else SHARE_TOKENIZER
            flags["distributed_executor_backend"] = backend
        if prod(sizes) > 1:  # vLLM gives each rank a NUMA node of its own unless told which cores are whose
            env["VLLM_CPU_OMP_THREADS_BIND"] = bind_cores(prod(sizes))
    if weights == "dummy":
        flags["load_format"] = "dummy"
    try:
        words = tuple(shlex.split(os.environ.get("QRECIPE_SERVE_EXTRA", "")))
    except ValueError as e:
        what = "QRECIPE_SERVE_EXTRA cannot be read as words of a command line"
        raise BadInput(f"{what} ({e}): close its quotes") from None
    changes |= {"extra": words + tuple(changes.get("extra", ())), "env": env | changes.get("env", {})}
    return ServeRecipe(**flags | changes)
