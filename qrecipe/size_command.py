"""`qrecipe size`: the budget on the command line. Read by argparse: typer's parser loads pydantic, half of the time."""

import argparse
import difflib
import json
from dataclasses import fields

from qrecipe.checks import whole_number
from qrecipe.errors import BadInput
from qrecipe.memory import Flags, budget

HELP = {
    "max_model_len": "tokens; the model's own maximum when not given",
    "gpu_memory_utilization": "share of the card's total memory",
    "dtype": "auto (the checkpoint's own), bfloat16, float16 or float32",
    "quantization": "fp8, int8, awq, gptq, bitsandbytes or nvfp4; the checkpoint's own when not given",
    "kv_cache_dtype": "auto or fp8",
    "mamba_ssm_cache_dtype": "of the GDN layers' states; the model's own when not given",
    "prefix_caching": "opt-in for hybrid models",
    "speculative_tokens": "draft tokens of the model's own MTP layers",
    "max_num_seqs": "requests worked on at once; vLLM's default for the card when not given",
    "max_num_batched_tokens": "tokens worked on in one step; vLLM's default for the card when not given",
    "enforce_eager": "no CUDA graphs",
    "block_size": "tokens, a multiple of 16; what the model's layers need when not given",
    "language_model_only": "no pictures, no vision tower",
    "limit_mm_per_prompt": 'JSON, for example {"image": 4, "video": 0}',
    "tensor_parallel_size": "every layer split over so many ranks",
    "pipeline_parallel_size": "layers dealt out to so many stages",
    "data_parallel_size": "so many copies of the engine",
    "nodes": "hosts that the ranks spread over",
    "disable_custom_all_reduce": "ranks add up by NCCL, not by vLLM's own kernel",
    "vllm_version": "0.27.0 when not given",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        message = message.replace("invalid whole_number value:", "a whole number such as 2 or 32k is expected, not")
        message = message.replace("invalid float value:", "a number such as 0.9 is expected, not")
        known = list(self._option_string_actions)
        for word in message.split() if "unrecognized" in message else ():
            if word.startswith("--") and (near := difflib.get_close_matches(word.split("=")[0], known, 1)):
                message += f"; did you mean {near[0]}?"
        raise BadInput(f"size: {message}; `qrecipe size --help` lists what it takes")


def parser() -> argparse.ArgumentParser:
    """One option for each field of Flags, and where the memory's size comes from."""
    made = _Parser("qrecipe size", allow_abbrev=False)
    made.description = "Predict what vLLM's start-up log will say of memory; exit 1 when it does not fit."
    made.add_argument("model", metavar="MODEL_OR_CONFIG", help="bundled name, config.json, folder or hub id")
    made.add_argument("--gpu", metavar="NAME", help="a card, for example 'RTX 4090'")
    made.add_argument("--gpu-memory", dest="gpu_memory_gib", metavar="SIZE", help="in all: 22.5, 24GB or 24GiB")
    made.add_argument("--available-kv", dest="available_kv_gib", type=float, metavar="GIB", help="as the log says it")
    made.add_argument("--calibrate", metavar="LOG", help="a start on this machine")
    made.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    for f in fields(Flags):
        kind = f.type.split(" ")[0]
        how = {"type": {"int": whole_number, "float": float}.get(kind, str), "metavar": kind.upper()[:5]}
        if kind == "bool":
            how = {"action": argparse.BooleanOptionalAction}
        made.add_argument(f"--{f.name.replace('_', '-')}", default=f.default, help=HELP[f.name], **how)
    return made


def predict(args: list[str]) -> int:
    """Print the budget, as a table or as JSON. 0: it fits, or nothing says that it does not; 1: it does not."""
    given = vars(parser().parse_args(args))
    as_json, found = given.pop("as_json"), budget(**given)
    facts = found.as_dict()
    if as_json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        for name in [n for n in facts if n not in ("how", "advice")]:
            value = facts[name]
            shown = "-" if value is None else "yes" if value is True else "no" if value is False else f"{value:,}"
            print(f"{name:24} {shown:>15}  {facts['how'].get(name, '')}")
        print(*[f"advice: {a}" for a in facts["advice"]], sep="\n", end="\n" * bool(facts["advice"]))
    return 1 if found.fits is False else 0
