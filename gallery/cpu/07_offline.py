import json
import os
import sys
import time


def answer(output):
    first = output.outputs[0]
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "tokens": len(first.token_ids),
        "text": first.text,
        "finish_reason": first.finish_reason,
        "logprobs": [[(i, p.decoded_token, p.logprob)
                      for i, p in step.items()]
                     for step in first.logprobs or []],
    }


def work(llm, questions, sampling, thinking=False):
    from vllm import SamplingParams

    began = time.perf_counter()
    outputs = llm.chat(
        [[{"role": "user", "content": q}] for q in questions],
        [SamplingParams(**s) for s in sampling],
        chat_template_kwargs={"enable_thinking": thinking},
        use_tqdm=False,
    )
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "answers": [answer(o) for o in outputs]}


def main():
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        try:
            reply = work(llm, **json.loads(line))
        except ValueError as why:
            reply = {"error": str(why)}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
