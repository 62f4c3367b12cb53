"""Where the seconds of the CPU engine's start go, and what the book's own levers save.

A start of the tiny teaching model computes next to nothing: it is Python importing itself in several processes, a
processor that copies its tokenizer, and a warm-up. This starts the book's recipe for real, reads the stages from
vLLM's own log with the reader's clock, and stops it again. With --compare it starts once more without the book's
levers (tokenizer shared instead of copied, worker inside the engine core) and prints the ratio. The last line is JSON.

    python benchmarks/start.py [--compare] [--port 8055]
"""

import argparse
import json
import time

from qrecipe.chapter import open_chapter
from qrecipe.recipe import LEVERS, ServeRecipe
from qrecipe.serving import Server
from qrecipe.startup_log import read_log


def start(recipe: ServeRecipe) -> dict:
    """Seconds to ready, to the first answer, and at each stage of the log."""
    import openai

    began = time.monotonic()
    server = Server.start(recipe)
    ready = time.monotonic() - began
    client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key)
    client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=1)
    first = time.monotonic() - began - ready
    server.leave(wait=45)
    return {"ready": round(ready, 1), "first request": round(first, 1), "stages": read_log(server.log).stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--port", type=int, default=8055)
    args = parser.parse_args()
    chapter = open_chapter("start", {"engine": "cpu", "port": args.port})
    recipe = chapter.recipe()
    runs = {"the book's recipe": start(recipe)}
    if args.compare:
        env = {k: v for k, v in recipe.env.items() if k not in LEVERS}
        plain = recipe.with_(env=env, distributed_executor_backend=None)
        runs["without its levers"] = start(plain)
    for name, run in runs.items():
        print(f"{name}: ready after {run['ready']} s, first request {run['first request']} s more")
        for stage, seconds in run["stages"]:
            print(f"  {seconds if seconds is not None else '?':>6} s  {stage}")
    result = {"device": chapter.device, "versions": chapter.versions, "runs": runs}
    if args.compare:
        result["ratio"] = round(runs["without its levers"]["ready"] / runs["the book's recipe"]["ready"], 2)
        print(f"the levers make the start {result['ratio']} times faster")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
