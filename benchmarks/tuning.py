"""Levers of a server, one at a time from the book's plain recipe: what each does to ITL, throughput and memory.

For each lever a server is started, measured and stopped. ITL is the median gap between tokens of one request alone
(256 tokens read, 256 written, greedy); throughput counts the tokens written a second with 64 requests at once (256
read, 128 written, 256 requests). Both are `vllm bench serve`, imported once, since that takes longer than the
measuring. Every server gets the same KV memory, so the tokens that its log counts compare. One JSON line a lever.

    python benchmarks/tuning.py [--model auto] [--weights dummy] [--levers plain fp8 …] [--out tuning.jsonl]

Not covered: the quality of the answers. fp8 rounds weights or cache; with dummy weights the share of accepted drafts
means nothing, so of speculation only a step's cost is told.
"""

import argparse
import asyncio
import contextlib
import io
import json
import time
from datetime import date
from pathlib import Path

from qrecipe.paths import state_dir
from qrecipe.recipe import ServeRecipe
from qrecipe.startup_log import read_log

KV_BYTES, PLACES, CROWD = 5 << 30, 128, 64
TUNED = ("--compilation-config", '{"compile_sizes": [1]}')
DRAFT = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
LEVERS = {  # name: what differs from the plain recipe
    "plain": {},
    "kernels tuned for one": {"extra": TUNED},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "text only": {"language_model_only": True},
    "MTP, 1 token": {"extra": DRAFT},
    "fp8 weights, text only, tuned for one": {"quantization": "fp8", "language_model_only": True, "extra": TUNED},
}


def pulled(plain: ServeRecipe, lever: str) -> ServeRecipe:
    """The recipe of a lever. Text only gets a cache of its own, so that its compiling is seen (its key is its own anyway)."""
    changes = LEVERS[lever] | {"max_num_seqs": PLACES}
    extra = (*plain.extra, "--kv-cache-memory-bytes", str(KV_BYTES), *changes.pop("extra", ()))
    own = {"VLLM_CACHE_ROOT": str(state_dir() / "cache-text-only")} if "language_model_only" in changes else {}
    return plain.with_(**changes, extra=extra, env=plain.env | own)


def bench(base_url: str, model: str, tokenizer: str, at_once: int, prompts: int, read: int, write: int) -> dict:
    """One `vllm bench serve` in this process; its result without the per-request lists."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    words = f"""--backend openai --endpoint /v1/completions --base-url {base_url.removesuffix("/v1")} --model {model}
        --dataset-name random --random-input-len {read} --random-output-len {write} --ignore-eos --temperature 0
        --seed {int(time.time())} --num-warmups {min(at_once, 8)} --max-concurrency {at_once} --num-prompts {prompts}
        --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99 --disable-tqdm --tokenizer"""
    with contextlib.redirect_stdout(io.StringIO()):
        found = asyncio.run(main_async(parser.parse_args([*words.split(), tokenizer])))
    if found["completed"] != prompts:
        raise RuntimeError(f"{found['completed']} of {prompts} requests succeeded at {base_url}")
    return {k: v for k, v in found.items() if isinstance(v, (int, float, str))}


def measure(base_url: str, model: str, tokenizer: str) -> dict:
    """ITL of one alone, throughput of a crowd. With speculation ITL is a step's time, whatever was accepted."""
    alone = bench(base_url, model, tokenizer, 1, 4, 256, 256)
    crowd = bench(base_url, model, tokenizer, CROWD, 4 * CROWD, 256, 128)
    accepted = alone.get("spec_decode_acceptance_length", 1.0)
    return {
        "itl_ms": alone["median_itl_ms"], "tpot_ms": alone["mean_tpot_ms"], "tokens_a_step": accepted,
        "tokens_s_1": alone["output_throughput"], f"tokens_s_{CROWD}": crowd["output_throughput"],
        f"tpot_ms_{CROWD}": crowd["mean_tpot_ms"], f"ttft_ms_{CROWD}": crowd["median_ttft_ms"],
    }  # fmt: skip


def row(lever: str, recipe: ServeRecipe, log: Path, figures: dict) -> dict:
    """One line of the result: what was asked for, what the log says, what was measured."""
    found, flags = read_log(log), [w for f in recipe.flags() for w in f if w] + list(recipe.extra)
    told = (
        "weights_gib",
        "cuda_graph_gib",
        "kv_cache_tokens",
        "attention_block_tokens",
        "compile_seconds",
        "init_seconds",
    )
    return {"lever": lever, "flags": flags, **{k: getattr(found, k) for k in told}, **figures}


def main() -> None:
    from qrecipe.chapter import open_chapter
    from qrecipe.serving import Server

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="auto")
    parser.add_argument("--weights", default="real", choices=["real", "dummy"])
    parser.add_argument("--levers", nargs="+", default=list(LEVERS), choices=LEVERS)
    parser.add_argument("--port", type=int, default=8056)
    parser.add_argument("--out", type=Path, default=Path("tuning.jsonl"))
    args = parser.parse_args()
    chosen = {"engine": "gpu", "model": args.model, "weights": args.weights, "port": args.port}
    chapter = open_chapter("tuning", chosen)
    stamp = {"device": chapter.device, "versions": chapter.versions, "date": str(date.today()), "weights": args.weights}
    for lever in args.levers:
        recipe = pulled(chapter.recipe(), lever)
        server = Server.start(recipe)
        try:
            found = row(lever, recipe, server.log, measure(server.base_url, server.model, chapter.model_dir)) | stamp
        finally:
            server.leave(wait=60)
            time.sleep(10)  # until the driver has the memory back
        with open(args.out, "a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")
        crowd = found[f"tokens_s_{CROWD}"]
        print(f"{lever}: ITL {found['itl_ms']:.2f} ms, {crowd:,.0f} tokens/s with {CROWD} at once", flush=True)


if __name__ == "__main__":
    main()
