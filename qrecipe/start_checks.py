"""Before a start: what can be known without starting, the key that the server gets, and its new log."""

import ipaddress
import os
import secrets
import socket
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from .errors import BadInput
from .paths import ROOM, state_dir, writable
from .processes import listener
from .recipe import ServeRecipe

LOGS_KEPT = 20
OURS = {  # words that are not taken from `extra`, and where they are given: what is said of them is checked or printed
    "--api-key": "VLLM_API_KEY", "--host": "host", "--port": "port", "--trust-remote-code": "trust_remote_code",
    "--allowed-media-domains": "allowed_media_domains (--images-from)", "--config": "words of the command line",
}  # fmt: skip


def process_argv(recipe: ServeRecipe) -> list[str]:
    """The recipe's command as this Python runs it: `vllm` is found whatever PATH says."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *recipe.argv()[1:]]


def check_start(recipe: ServeRecipe) -> None:
    """What can be known before a start: are the words ours, is the model there and complete, the port free, the GPU idle?"""
    for word in (word.split("=")[0].replace("_", "-") for word in recipe.extra):
        # vLLM takes --hos as well
        if ours := [own for own in OURS if own.startswith(word) and word[:2] == "--" != word]:
            raise BadInput(f"{word} among the extra words: give it as {OURS[ours[0]]}")
    path = Path(recipe.model)
    if path.is_absolute() or path.exists() or recipe.model.startswith((".", "~")):
        from .fetch import require_folder

        require_folder(path, weights=recipe.load_format != "dummy")
    try:
        family, kind, _, _, where = socket.getaddrinfo(recipe.host, recipe.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(where)
    except OSError as e:
        raise BadInput(
            f"port {recipe.port} on {recipe.host} cannot be used ({e.strerror}, held by {listener(recipe.port)}): stop that, or choose another port, {recipe.port + 1} say"
        ) from None
    if recipe.ranks > 1:
        from .pool import check_parallel
        from .shape import load_shape

        check_parallel(load_shape(recipe.model), recipe.tensor_parallel_size or 1, recipe.pipeline_parallel_size or 1)
    cpu = "VLLM_CPU_KVCACHE_SPACE" in recipe.env
    if head := recipe.env.get("RAY_ADDRESS"):
        if cpu:  # "current platform cpu does not support ray": tried with 0.27.0 and ray 2.60.0
            raise BadInput("vLLM's CPU engine does not run over Ray: take vLLM's own lines of chapter 09_scale_out")
        check_head(head)
    if not cpu and recipe.gpu_memory_utilization:
        check_gpus(recipe.gpu_memory_utilization, (recipe.tensor_parallel_size or 1) if head else recipe.ranks)


def check_head(address: str) -> None:
    """BadInput when no Ray head answers at HOST:PORT, or when this environment has no Ray to join it with."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            pass
    except (OSError, ValueError, OverflowError) as e:
        raise BadInput(
            f"no Ray head answers at {address!r} ({e}): on that host run 'ray start --head --port 6379', on each other one 'ray start --address HOST:6379', and give HOST:6379"
        ) from None
    if find_spec("ray") is None:
        raise BadInput("several hosts need Ray and it is not installed here: uv pip install ray, on every host")


def check_gpus(share: float, count: int) -> None:
    """BadInput when there are fewer than `count` GPUs, when these are of different size, or when one has less free memory
    than `share` of its total; no driver, no check."""
    from .facts import _output

    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    query = ["nvidia-smi", "--query-gpu=index,memory.free,memory.total", "--format=csv,noheader,nounits"]
    rows = [r.split(", ") for r in _output(*query, *(["-i", ",".join(visible)] if visible else [])).splitlines()]
    rows = [r for r in rows if len(r) == 3 and r[1].isdigit() and r[2].isdigit()]
    if rows and len(rows) < count:
        raise BadInput(
            f"{count} ranks are asked for and {len(rows)} GPU{'s are' if len(rows) > 1 else ' is'} here, each rank needs one of its own: lower the tensor-, pipeline- or data-parallel size, or spread over hosts (chapter 09_scale_out has the lines)"
        )
    sizes = [int(total) for _, _, total in rows[:count]]
    if sizes and max(sizes) > 1.05 * min(sizes):
        raise BadInput(
            f"the first {count} GPUs have {', '.join(f'{size / 1024:.0f}' for size in sizes)} GiB: every rank gets the same share of its own card, so take cards of one size (CUDA_VISIBLE_DEVICES=0,2 chooses)"
        )
    for index, free, total in rows[:count]:
        if int(free) < share * int(total):
            holders = _output(
                "nvidia-smi", "-i", index, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
            )
            raise BadInput(
                f"GPU {index} has {int(free) / 1024:.1f} of {int(total) / 1024:.1f} GiB free, {share:.2f} of it all is asked for: end what uses it ({' | '.join(holders.split(chr(10))).strip(' |') or 'not visible from here'}), or lower --gpu-memory-utilization to {int(free) / int(total) * 0.98:.2f}"
            )


def given_key() -> str:
    """$VLLM_API_KEY, without the line's end that a paste may bring; "" where there is none ("EMPTY" is what clients then send)."""
    key = os.environ.get("VLLM_API_KEY", "").strip()
    return "" if key == "EMPTY" else key


def key_for(recipe: ServeRecipe, folder: Path, new: bool) -> str | None:
    """The API key that the server gets: $VLLM_API_KEY, else with `new` one of its own, kept in its folder from start to start.

    Raises BadInput for a host that other machines reach and no key.
    """
    key, file = given_key(), folder / "api-key"
    try:
        local = recipe.host == "localhost" or ipaddress.ip_address(recipe.host).is_loopback
    except ValueError:
        local = False
    if not key:
        key = file.read_text() if (new or not local) and file.is_file() else None
    if new and not key:
        key = secrets.token_urlsafe(32)
    if not (key or local):
        raise BadInput(
            f"host {recipe.host} lets other machines in and there is no API key: set VLLM_API_KEY, or let --new-key make one"
        )
    return key


def new_log(log_dir: Path | None, port: int) -> Path:
    """A log file that did not exist before; of the older ones in the state folder the last twenty are kept, and those in use."""
    folder = writable(Path(log_dir) if log_dir else state_dir() / "logs", room=ROOM)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for n in range(1000):
        log = folder / f"server-{stamp}-port{port}{f'-{n}' if n else ''}.log"
        try:
            log.touch(exist_ok=False)
            break
        except FileExistsError:
            continue
    if not log_dir:
        states = (state_dir() / "servers").glob("port-*/server.json")
        named = " ".join(p.read_text(errors="replace") for p in states)
        for old in sorted(folder.glob("server-*.log"))[:-LOGS_KEPT]:
            if old.name not in named:
                old.unlink(missing_ok=True)
    return log
