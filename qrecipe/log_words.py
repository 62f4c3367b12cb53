"""The wordings of vLLM's start-up log: which words stand beside which figure.

A figure is found by its words, wherever they stand in the line. Each rule has an *anchor* (a short literal that a
fast byte search can look for), what must stand left of the anchor, and what must follow from the anchor on. Spaces
stand for any white space, also a line break: `clean` has made one space of it before a rule is tried.

Sources: vLLM's own messages, 0.6 to 0.27 (V0 and V1 engine, both model runners), and public start-up logs to 0.30.
"GB" in the old "took 14.9888 GB" is 2^30 bytes: those versions divided by 2^30 and wrote GB.
"""

import re

NUMBER = r"(-?\d[\d,]{0,20}(?:\.\d{1,12})?)"
RANK_FIELDS = (  # figures that every rank logs for itself
    "weights_gib", "load_seconds", "consumed_gib", "non_torch_gib", "activation_gib", "cuda_graph_estimate_gib",
    "cuda_graph_gib", "available_kv_gib", "total_gib", "free_gib", "utilization", "requested_gib",
)  # fmt: skip
SMALLEST = {
    "kv_cache_tokens",
    "max_concurrency",
    "gpu_blocks",
    "available_kv_gib",
    "free_gib",
    "total_gib",
    "max_model_len",
}
WHOLE = {"kv_cache_tokens", "max_model_len", "attention_block_tokens", "gpu_blocks", "max_num_batched_tokens"}


def _rule(anchor: str, fields: str, left: str, right: str) -> tuple:
    def pattern(text: str, tail: str = "") -> re.Pattern:
        return re.compile(text.replace("<n>", NUMBER).replace("GB", "Gi?B") + tail)

    return anchor.encode(), tuple(fields.split()), pattern(left, "$") if left else None, pattern(right)


# anchor | fields, in the order of their groups (left first) | left of the anchor | from the anchor on
RULES = [
    _rule("took", "weights_gib load_seconds", "Model loading ", "took <n> ?GB(?: memory)?(?: and <n>)?"),
    _rule("took", "weights_gib", "Loading model weights ", "took <n> ?GB"),
    _rule("took", "weights_read_seconds", "Loading weights ", "took <n> s"),
    _rule("took", "compile_seconds", r"torch\.compile ", "took <n> s"),
    _rule("takes", "compile_seconds", r"torch\.compile ", "takes <n> s"),
    _rule("took", "capture_seconds cuda_graph_gib", r"Graph capturing finished in <n> secs?, ", "took <n> ?GB"),
    _rule(
        "took", "init_seconds compile_seconds", r"init engine \([^()]*\) ", r"took <n> s\w*(?: \(compilation: <n> s)?"
    ),
    _rule("took", "warmup_seconds", r"Initial profiling/warmup run ", "took <n> s"),
    _rule("GiB", "consumed_gib", "<n> ?", "GiB for consumed memory"),
    _rule("GiB", "weights_gib", "Actual usage(?: is|:) <n> ?", "GiB for weight"),
    _rule("GiB", "activation_gib", "<n> ?", "GiB for peak activation"),
    _rule("GiB", "non_torch_gib", "<n> ?", "GiB for non-torch memory"),
    _rule("GiB", "cuda_graph_gib", "<n> ?", r"GiB for \w+ ?[Gg]raph memory"),
    _rule("GiB", "available_kv_gib", r"[Aa]vailable KV cache memory(?: is)?[:=]? \(?<n> ?", "GiB"),
    _rule("GiB", "cuda_graph_estimate_gib", "Estimated CUDA graph memory: <n> ?", "GiB"),
    _rule("GiB", "cuda_graph_gib", "<n> ?", r"GiB \(actual\)"),
    _rule("GiB", "cuda_graph_estimate_gib", "<n> ?", r"GiB \(estimated\)"),
    _rule("GiB", "free_gib total_gib", r"Free memory on device[^()]*\(<n>/<n> ?", r"GiB\) on startup"),
    _rule("GiB", "utilization requested_gib", r"esired GPU memory utilization(?: is)? \(<n>, <n> ?", "GiB"),
    _rule("GiB", "free_gib", "Initial free memory <n> ?", "GiB, reserved"),
    _rule("GiB", "available_kv_gib", r"Current kv cache memory in use is <n> ?", "GiB"),
    _rule("GiB", "available_kv_gib", r"reserved <n> ?", "GiB memory for KV Cache as specified"),
    _rule("to maintain the same", "utilization", "utilization from <n> to <n> ", "to maintain the same"),
    _rule("is equivalent to", "utilization", "current --gpu-memory-utilization=<n> ", "is equivalent to"),
    _rule("GiB", "available_kv_gib total_gib", r"set \(<n>/<n>\) ", "GiB for KV cache on node"),
    # V0: one sentence, and key=value
    _rule("GiB", "weights_gib", "model weights takes? <n> ?", "GiB"),
    _rule("GiB", "non_torch_gib", "non_torch_memory(?: takes |=| )<n> ?", "GiB"),
    _rule("GiB", "activation_gib", "PyTorch activation peak memory (?:takes )?<n> ?", "GiB"),
    _rule("GiB", "available_kv_gib", "reserved for KV Cache is <n> ?", "GiB"),
    _rule("GiB", "total_gib", r"total_gpu_memory(?:=| \(?)<n> ?", "GiB"),
    _rule("GiB", "available_kv_gib", r"(?:kv_cache_size=|available_kv_cache_memory )<n> ?", "GiB"),
    _rule("GiB", "utilization requested_gib", r"gpu_memory_utilization \(<n>\) = <n> ?", "GiB"),
    _rule("GiB", "requested_gib", "instance can use <n> ?", "GiB"),
    _rule("GiB", "weights_gib", "; weights memory: <n> ?", "GiB"),
    _rule("GiB", "activation_gib", "torch peak memory increase: <n> ?", "GiB"),
    _rule("GiB", "non_torch_gib", "non-torch forward increase memory: <n> ?", "GiB"),
    _rule("size", "kv_cache_tokens", "GPU KV cache ", "size: <n> tokens"),
    _rule("size", "attention_block_tokens", r"Setting attention block ", "size to <n> tokens"),
    _rule("size", "mamba_padding_pct", "Padding mamba page ", "size by <n>%"),
    _rule("concurrency", "max_model_len max_concurrency", "Maximum ", "concurrency for <n> tokens per request: <n>x"),
    _rule("blocks:", "gpu_blocks", r"(?:GPU|cuda) ", "blocks: <n>"),
    _rule("len ", "max_model_len", "Using max model ", "len <n>"),
    _rule("warmup", "mm_warmup_seconds", r"(?<!eadonly )Multi-modal ", "warmup completed in <n>"),
    _rule(
        "prefill is enabled", "max_num_batched_tokens", "Chunked ", "prefill is enabled with max_num_batched_tokens=<n>"
    ),
]
# anchor | field or backend | left | from the anchor on; the value is the one group
_NAME = r"([A-Za-z][\w.+/-]{0,60})"
TEXTS = [
    (b"rchitecture", "architecture", re.compile("Resolved a$"), re.compile(rf"rchitectures?: {_NAME}")),
    (b"version", "vllm_version", re.compile(r"(?:vLLM API server|█|vLLM) $"), re.compile(r"version v?(\d[\w.+-]{0,40})")),
    (b"LLM engine (v", "vllm_version", None, re.compile(r"LLM engine \(v(\d[\w.+-]{0,40})\)")),
    (b"Starting to load model", "model", None, re.compile(r"Starting to load model (\S{1,200}?)(?:\.\.\.|\s|$)")),
    (b"backend", "attention", re.compile(rf"Using {_NAME} (?:attention )?$"), re.compile("backend out of potential")),
    (b"backend", "attention", re.compile(r"Using ([A-Z]\w+(?: Attention)?) $"), re.compile(r"backend(?: on V1 engine)?\.")),
    (b"backend", "attention", re.compile("KV cache layout for (CPU_ATTN) $"), re.compile("backend")),
    (b"backend", "vision attention", re.compile(r"Using (?:default )?$"), re.compile(rf"backend (?:AttentionBackendEnum\.)?{_NAME} for vit")),
    (b"backend", "communication", re.compile(r"distributed_init_method=\S+ $"), re.compile(rf"backend={_NAME}")),
    (b"MMEncoderAttention", "vision attention", re.compile(r"Using AttentionBackendEnum\.(\w+) for $"), re.compile("MMEncoderAttention")),
    (b"GDN prefill", "GDN prefill", re.compile(rf"Using {_NAME} $"), re.compile("GDN prefill kernel")),
    (b"version", "FlashAttention", re.compile("Using FlashAttention $"), re.compile(r"version (\d+)")),
    (b"for top-p", "sampling", re.compile(rf"Using {_NAME} $"), re.compile("for top-p")),
]  # fmt: skip

# single words of which one stands near when a frequent anchor belongs to a figure: a cheap look before the close one
NEAR = {
    b"GiB": (b"memory", b"activation", b"weight", b"Cache", b"(estimated)", b"(actual)", b"startup", b"utilization", b"node", b"kv_cache", b"instance"),
    b"took": (b"oading", b"compile", b"captur", b"engine", b"profiling"),
    b"takes": (b"compile",), b"size": (b"cache", b"attention", b"mamba"), b"concurrency": (b"Maximum",),
    b"blocks:": (b"GPU", b"cuda"), b"version": (b"\xe2\x96\x88", b"vLLM", b"FlashAttention", b"\\u2588"),
    b"backend": (b"Using", b"method", b"layout"), b"len ": (b"model",), b"warmup": (b"odal",), b"rchitecture": (b"Resolved",),
}  # fmt: skip
NEAR_ANY = {anchor: re.compile(b"|".join(map(re.escape, near))) for anchor, near in NEAR.items()}


def is_near(anchor: bytes, around: bytes) -> bool:
    """Whether these surroundings of an anchor can hold one of its figures."""
    pattern = NEAR_ANY.get(anchor)
    return pattern is None or pattern.search(around) is not None


STAGES = ("import", "config", "load", "compile", "profile", "graphs", "warmup", "ready")
STAGE_WORDS = [  # the line that opens a stage
    (b"non-default args", "config"), (b"Resolved architecture", "config"),
    (b"with config", "config"), (b"Starting to load model", "load"),
    (b"Using cache directory", "compile"), (b"Dynamo bytecode", "compile"), (b"Warming up model for", "compile"),
    (b"torch.compile to", "profile"), (b"torch.compile ta", "profile"), (b"Initial profiling", "profile"),
    (b"Profiling CUDA graph", "graphs"), (b"Capturing CUDA graph", "graphs"),
    (b"Graph capturing finished", "warmup"), (b"init engine (", "warmup"),
    (b"startup complete", "ready"), (b"Uvicorn running on", "ready"),
]  # fmt: skip
EAGER_WORDS = (b"nforce eager set", b"Cudagraph is disabled under eager", b"enforce_eager': True")
ARGS = (b"non-default args", b"args: Namespace(")
ERRORS = (b"Error", b"ERROR", b"xception", b"Killed", b"died", b"out of memory", b"No space left", b"CUDA error")
STOPPED = (b"shutdown triggered", b"Received SIGTERM", b"Received SIGINT")
METRICS = b"Avg prompt throughput"
METRIC_WORDS = {
    "prompt_tps": re.compile(r"Avg prompt throughput: ([\d.]{1,20}) tokens/s"),
    "generation_tps": re.compile(r"Avg generation throughput: ([\d.]{1,20}) tokens/s"),
    "running": re.compile(r"Running: (\d{1,9}) reqs"),
    "waiting": re.compile(r"(?:Waiting|Pending): (\d{1,9}) reqs"),
    "kv_usage_pct": re.compile(r"GPU KV cache usage: ([\d.]{1,20})%"),
    "prefix_hit_pct": re.compile(r"(?<!External )(?<!GPU: )[Pp]refix cache hit rate:(?: GPU:)? ([\d.]{1,20})%"),
    "mm_hit_pct": re.compile(r"MM cache hit rate: ([\d.]{1,20})%"),
}

_ANSI = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;?]{0,20}[A-Za-z]", re.I)
_ANSI_SIGNS = ("\x1b", "\\u001b", "\\u001B", "\\x1b", "\\033")
_BARE = re.compile(r"\[(?:\d{1,2}(?:;\d{1,3}){0,4})?m")  # a colour whose escape character was lost on the way
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
PREFIX = (  # what loggers and containers put before a message
    r"(?: {0,4}[\w./-]{0,60} *\| ?)?"  # compose
    r"(?:\S{3,5} +\d{1,2} \d\d:\d\d:\d\d \S{1,60} \S{1,60}\[\d{1,9}\]: )?"  # journald
    r"(?:\[?\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?\]? ?(?:- )?)?(?:std(?:out|err) [FP] )?"
    r"(?:\((?:APIServer|ApiServer|EngineCore|Worker|VllmWorker|Ray|LLM|DPCoord)[^()\n]{0,60}\) ?)?"
    rf"(?:{_LEVEL}:? (?:\d\d-\d\d \d\d:\d\d:\d\d )?(?:\[?[\w./-]{{1,80}}\.(?:py|cpp):\d{{1,6}}\] ?)?)?"
)
_BREAK = re.compile(r"(?:\r?\n|\\r\\n|\\n)" + PREFIX + r"[ \t]*")
_START = re.compile(PREFIX)
_SPACES = re.compile(r"[\t\r\n\u00a0]+ *| {2,}")
LABEL = re.compile(rb"\(((?:EngineCore|Worker|VllmWorker|Ray\w*Worker)[^()\n]{0,60})\)")
RECORD = re.compile(
    rf"(?m)(?:^|[\s>)\"|]){_LEVEL}:? .{{0,40}}?\[?[\w./-]+\.(?:py|cpp):\d+\]|\((?:APIServer|EngineCore|Worker)\w* ?[^()\n]*\)"
)
TIME = re.compile(rb"(?:(\d{4})-)?([01]\d)-([0-3]\d)[T ]([0-2]\d):([0-5]\d):([0-6]\d)(?:[.,](\d{1,9}))?")


_LEVEL_AND_TIME = re.compile(rf"\b{_LEVEL}:? \[?(?:\d{{4}}-)?\d\d-\d\d[ T]\d\d:")
_WORD = re.compile("Error|ERROR|Exception")
_QUIET = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")


def is_quiet(line: str, at: int | None = None) -> bool:
    """Whether the error's words (at `at`, else the first in the line) report no error: by vLLM's own level, the last one
    where a collector put its own before."""
    at = at if at is not None else found.start() if (found := _WORD.search(line)) else 40
    levels = _LEVEL_AND_TIME.findall(line[: at + 30])
    return _QUIET.search(levels[-1] if levels else line[:at]) is not None


def plain(text: str) -> str:
    """The text without terminal colours, also where JSON escaped them or the escape character was lost."""
    if any(sign in text for sign in _ANSI_SIGNS):
        text = _ANSI.sub("", text)
    return _BARE.sub("", text) if "[" in text else text


def clean(raw: bytes) -> str:
    """One line of plain text: colours, escapes, line breaks and the prefixes after them gone; white space single."""
    text = plain(raw.decode("utf-8", "replace"))
    if "\n" in text or "\\n" in text:
        text = _BREAK.sub(" ", text)
    return _SPACES.sub(" ", text.replace('\\"', '"'))


def message(line: str) -> str:
    """The message of a log line without colours and the logger's prefix; leading blanks of it are kept."""
    text = plain(line).rstrip("\r\n")
    if text.lstrip().startswith("{"):
        found = re.search(r'"(?:log|msg|message)"\s*:\s*"((?:[^"\\]|\\.)*)', text)
    else:
        found = re.search(r'\bmsg="((?:[^"\\]|\\.)*)', text)
    if found:
        text = found[1].replace('\\"', '"').replace("\\n", "")
    return text[_START.match(text).end() :]
