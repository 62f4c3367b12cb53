"""vLLM's `LLM` class in a process of its own, so that its memory is given back when it ends."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .child import Child
from .errors import RequestFailed, ServerFailed

LLM_SHARE = 0.92  # of the GPU's memory: the default of vLLM 0.27.0's LLM class
START_LIMIT = 1200.0  # seconds that the LLM may take to start
ATTACHED = (
    "base_url names a server, so nothing is started here, and LLM would be an engine of its own: run this chapter without "
    "base_url, or give it the folder of a model as parameter model"
)

SERVER_ONLY = re.compile(
    "host|port|uds|headless|middleware|root_path|lora_modules|response_role|log_config_file|log_error_stack|max_log_len"
    "|return_tokens_as_token_ids|trust_request_chat_template|exclude_tools_when_tool_choice_none"
    "|allow_credentials|allowed_(headers|methods|origins)"
    "|(api|ssl|uvicorn|h11|tool|chat_template|default_chat_template|cohere|fingerprint|dp_supervisor)_.*"
    "|chat_template|data_parallel_supervisor_port|disable_(access|fastapi|uvicorn)_.*"
    "|enable_(auto_tool|flash_late|force_include|log|offline|per_request|prompt_tokens|request_id|server_load|ssl|tokenizer_info)_.*"
)


def no_room(memory: tuple[float, float] | None, share: float = LLM_SHARE) -> str | None:
    """Why an LLM that plans with `share` of the GPU cannot start: None when it can, or when there is no GPU.

    `memory` is (total, free) in GiB, as `gpu_memory` finds it.
    """
    total, free = memory or (0.0, 0.0)
    if free >= share * total:
        return None
    return (f"LLM asks for {share:.2f} of the GPU's {total:.1f} GiB, that is {share * total:.1f} GiB, and {free:.1f} GiB "
            "are free: a server holds the rest. Stop it first (qrecipe stop), and run this chapter without base_url")  # fmt: skip


def gpu_memory(wait: float = 0.0, share: float = LLM_SHARE) -> tuple[float, float] | None:
    """(total, free) GiB of the first GPU that CUDA may use, None without one.

    With `wait`, looks again for that many seconds while less than `share` is free: a server that has just ended gives
    its memory back a moment later.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        handle, deadline = by(int(first) if first.isdigit() else first), time.monotonic() + wait
        while (found := pynvml.nvmlDeviceGetMemoryInfo(handle)).free < share * found.total:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return found.total / 2**30, found.free / 2**30
    except pynvml.NVMLError:
        return None


class Place(NamedTuple):
    """Where an LLM of this chapter would run: engine ("cpu" or "gpu"), model folder or hub id, and why not (None: it can)."""

    engine: str
    model: str
    why_not: str | None


def place(chapter: Any, share: float = LLM_SHARE) -> Place:
    """Whether LLM can run here beside what runs already: the GPU must have room, and with `base_url` a model be asked for."""
    from .layers import choose_engine, gather

    engine, asked = chapter.engine, chapter.parameters.get("model", "auto")
    if engine == "attached":
        engine, _ = choose_engine(gather(), chapter.parameters.get("engine", "auto"))
        if not Path(asked).is_dir():
            return Place(engine, asked, ATTACHED)
    if engine == "gpu" and (why := no_room(gpu_memory(wait=20, share=share), share)):
        return Place(engine, "", why)
    return Place(engine, asked if chapter.engine == "attached" else chapter.model_dir, None)


class Offline:
    """A script that keeps an `LLM` and answers each JSON line with one: {"error": …} or what it was asked for.

    The script's first line is the arguments of LLM. Its log (vLLM's, and any traceback) is `log`.
    """

    def __init__(
        self, script: Path, arguments: dict, *, log: Path, env: dict | None = None,
        on_progress: Callable[[float | None, Path], None] | None = None,
    ):  # fmt: skip
        self.child = Child([sys.executable, str(script)], log, env)
        self.log = self.child.log
        report, began = on_progress or (lambda *_: None), time.monotonic()
        self._exchange(arguments, START_LIMIT, lambda seconds: report(seconds, self.log))
        self.ready_seconds = time.monotonic() - began
        report(None, self.log)

    def ask(self, *, timeout: float = 600.0, **job: Any) -> Any:
        """Send a job and wait for its answer. ServerFailed with the log's cause when the process ends meanwhile."""
        return self._exchange(job, timeout)

    def _exchange(self, message: dict, timeout: float, on_wait: Callable | None = None) -> Any:
        try:
            self.child.send(json.dumps(message))
            if (line := self.child.readline(timeout, on_wait)) is None:
                self.child.process.wait(10)
                raise ServerFailed(self.child.why())
            answer = json.loads(line)
        except BaseException as problem:  # interrupted, too: an answer still to come would be taken for the next one's
            self.close()
            if isinstance(problem, TimeoutError):
                why = f"no answer within {timeout:.0f} s, so the process was ended; its log: {self.log}"
                raise ServerFailed(why) from None
            if isinstance(problem, ValueError):
                raise ServerFailed(f"the script wrote {line[:80]!r} where a line of JSON was expected") from None
            raise
        if isinstance(answer, dict) and "error" in answer:
            raise RequestFailed(answer["error"])
        return answer

    def close(self) -> list[int]:
        """End the process and give its memory back. Returns ids of processes that could not be ended."""
        return self.child.end(patience=5.0)


def extra_arguments(words: Sequence[str]) -> dict:
    """Words of a `vllm serve` command line as arguments of LLM: --max-num-seqs 8 becomes {"max_num_seqs": 8}.

    What only a server has (vLLM 0.27.0's FrontendArgs: its address, its keys, its log) is left out: LLM refuses it.
    """
    out: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            name = name.replace("-", "_")
            out[name] = _value(value) if given else True
        elif out:
            out[name] = _value(word)
    return {name: value for name, value in out.items() if not SERVER_ONLY.fullmatch(name)}


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
