"""The client's clock held against the server's, and what dissecting costs.

Theory. vLLM's /metrics histograms keep sums and sample counts, so the difference of two readings around one request on
an idle server is that request as the server saw it. Its TTFT starts when the API server has read the request and ends
when the first token leaves the engine; ours has HTTP both ways on top, which is measured right before each request (the
same messages under a model name that nobody serves) and taken off. Its inter-token histogram has one sample per engine
step, so the mean gap between arrivals is what compares. Tokens must agree exactly, times within 5 % or 3 ms, in that one
of the requests which waited least for a core.

The overhead is measured without a model: a stream of N chunks is replayed as fast as the client takes it, read by a
bare loop over the openai stream and by dissect in turn; the difference per chunk over 1 / 2,000 s is the share that
dissecting takes from a stream of 2,000 tokens/s. (What it does after the last chunk is given beside it.)

Not covered: more than one request at a time, servers other than vLLM.

    python benchmarks/clock.py --url http://127.0.0.1:8000/v1 [--repeat 5] [--max-tokens 64] [--no-overhead]

Prints a card and ends with one JSON line; exit code 1 when a figure does not agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from openai import OpenAI, OpenAIError

from qrecipe.errors import RecipeError
from qrecipe.metrics import hold
from qrecipe.request import dissect

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def overhead(chunks: int = 4000, repeat: int = 7) -> dict[str, float]:
    """Microseconds a chunk, on a replayed stream, median of `repeat`: a bare loop, dissect's own loop, the rest after it."""
    from replay import Reply, chunk, replay, sse

    pieces = sse(
        chunk({"role": "assistant", "content": ""}, usage=(9, 0)),
        *(chunk({"content": " word"}, usage=(9, n + 1)) for n in range(chunks)),
        chunk({"content": ""}, finish="stop", usage=(9, chunks + 1)), chunk(usage=(9, chunks + 1)), "[DONE]",
    )  # fmt: skip
    whole = [(0.0, b"".join(data for _, data in pieces))]
    ask = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    bare, loop, after = [], [], []
    with replay(*[Reply(whole)] * (2 * repeat)) as (url, _):
        client = OpenAI(base_url=url, api_key="none")
        for _ in range(repeat):
            start = time.perf_counter()
            for event in client.chat.completions.create(stream=True, **ask):
                _ = event.choices and event.choices[0].delta.content
            bare.append(time.perf_counter() - start)
            start = time.perf_counter()
            ours = dissect(client, **ask)
            total = time.perf_counter() - start
            loop.append(ours.chunks[-1].t)
            after.append(total - ours.chunks[-1].t)
    bare, loop, after = (statistics.median(times) * 1e6 / chunks for times in (bare, loop, after))
    return {"bare_us": bare, "loop_us": loop, "after_us": after, "share_at_2000": (loop - bare) * 2000 / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--no-overhead", action="store_true")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")
    try:
        model = client.models.list().data[0].id
        rows = hold(
            client, args.url, args.repeat, model=model, max_tokens=args.max_tokens, extra_body={"ignore_eos": True},
            messages=[{"role": "user", "content": "Count upwards from 1."}],
        )  # fmt: skip
    except (RecipeError, OpenAIError) as error:
        print(error)
        return 2
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(
        f"{model} at {args.url}: one of {args.repeat} requests of {args.max_tokens} tokens; load {load:.1f} on {cores} cores here\n"
    )
    print(f"{'figure':20}{'ours':>12}{'server':>12}{'difference':>12}  unit    agrees")
    for name, ours, servers, unit, apart, agrees in rows:
        figures = "".join(f"{'-' if x is None else f'{x:.3f}':>12}" for x in (ours, servers, apart))
        print(f"{name:20}{figures}  {unit:8}{ {True: 'yes', False: 'NO', None: '-'}[agrees] }")
    result = {row.name: row._asdict() for row in rows}
    good = all(row.agrees is not False for row in rows)
    if not args.no_overhead:
        result["overhead"] = cost = overhead()
        print(f"\nclient, us a chunk: bare loop {cost['bare_us']:.1f}, dissect {cost['loop_us']:.1f} while streaming "
              f"({cost['share_at_2000']:+.1%} of 2,000 tokens/s) and {cost['after_us']:.1f} afterwards")  # fmt: skip
    facts = {"benchmark": "clock", "url": args.url, "model": model, "load": load, "cores": cores, "agrees": good}
    print(json.dumps(facts | result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
