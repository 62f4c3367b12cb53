"""What can be wrong with a request: refused here before it is sent, or the server's refusal put into one sentence.

The sentences for 400, 401, 404 and 500 follow vLLM 0.27.0's own words; it sends no 429, which comes from a proxy before it
or from another vendor's server.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from .checks import check_number
from .errors import BadInput, RequestFailed

# what no server takes: (lowest, highest, kind)
_RANGES = {
    "max_tokens": (1, 10**9, int), "max_completion_tokens": (1, 10**9, int), "min_tokens": (0, 10**9, int), "n": (1, 10**6, int),
    "temperature": (0, 1000, float), "top_p": (1e-6, 1, float), "min_p": (0, 1, float), "top_k": (-1, 10**9, int),
    "presence_penalty": (-2, 2, float), "frequency_penalty": (-2, 2, float), "repetition_penalty": (1e-6, 1000, float),
    "timeout": (1e-6, 10**9, float),
}  # fmt: skip


def check_request(client: Any, model: Any, messages: Any, prompt: Any, max_tokens: Any, temperature: Any,
                  extra_body: dict | None, params: dict) -> None:  # fmt: skip
    """Raise BadInput for what cannot be sent: parts missing, numbers out of range, names the client does not know."""
    create = client.chat.completions.create if prompt is None else client.completions.create
    unknown = ", ".join(sorted(set(params) - set(inspect.signature(create).parameters)))
    parts = messages if isinstance(messages, list) else []
    roles = [m.get("role") if isinstance(m, dict) else getattr(m, "role", None) for m in parts]
    for wrong, why in [
        (type(client).__name__.startswith("Async"), "the client is asynchronous: give an openai.OpenAI, whose stream is read on one clock."),
        (not (isinstance(model, str) and model.strip()), f"model is {model!r}: give the name that /v1/models lists, for instance 'qwen3.5-4b'."),
        ((messages is None) == (prompt is None), "give either messages (chat) or prompt (completion), not both and not neither."),
        (messages is not None and not (roles and all(roles)), "messages must be a list of at least one {'role': ..., 'content': ...}."),
        (prompt is not None and not (isinstance(prompt, (str, list)) and prompt), "prompt must be a text or a list of token ids, and not empty."),
        (not isinstance(extra_body, dict | None), f"extra_body is {type(extra_body).__name__}: it must be a dict of fields the server adds."),
        (params.keys() & {"stream", "stream_options"}, "stream and stream_options are set here: a dissected request always streams and asks for usage."),
        (unknown, f"{unknown}: no parameter of the openai client; what the server adds goes into extra_body."),
    ]:  # fmt: skip
        if wrong:
            raise BadInput(why)
    for name, value in {"max_tokens": max_tokens, "temperature": temperature, **params, **(extra_body or {})}.items():
        if name in _RANGES and value is not None and type(value).__name__ not in ("Timeout", "NotGiven", "Omit"):
            low, high, kind = _RANGES[name]
            check_number(value, name, low, high, kind)


def served_models(client: Any) -> list[str]:
    """Names that /v1/models lists; empty when it cannot be read."""
    try:
        return [m.id for m in client.with_options(max_retries=0, timeout=5).models.list()]
    except Exception:  # it is asked only to word another error
        return []


def explain(error: Exception, client: Any, model: str) -> RequestFailed:
    """One sentence for what a client or server raised: what was found and what mends it."""
    return error if isinstance(error, RequestFailed) else RequestFailed(_sentence(error, client, model))


def _sentence(error: Exception, client: Any, model: str) -> str:
    base, said, name = str(client.base_url).rstrip("/"), _said(error), type(error).__name__
    status = getattr(error, "status_code", None) or 0
    v1 = "an OpenAI-compatible server"
    if status == 404:
        served = served_models(client)
        if served and model not in served:
            return f"the server at {base} has no model {model!r}: it serves {', '.join(map(repr, served))}."
        return f"{base} has no such address (404: {said}): base_url of {v1} ends in /v1."
    if status in (401, 403):
        mend = "pass OpenAI(api_key=...) the key that the server was started with (`vllm serve ... --api-key KEY`)"
        return f"{base} refused the API key ({status}): {mend}."
    if status == 429:
        wait = getattr(getattr(error, "response", None), "headers", {}).get("retry-after")
        return f"{base} is over its request limit (429): wait {f'{wait} s ' if wait else ''}and try again."
    if status in (400, 413, 422) or "local files" in said:  # vLLM 0.27.0 answers 500 to a file:// picture
        return _bad_request(said, status)
    if status >= 500:
        return f"the server failed with {status} ({said}): its own log says why; `qrecipe log FILE` reads it."
    if name == "APITimeoutError":
        return f"{base} was silent longer than the client's timeout: raise timeout= or look whether the server is busy."
    if name == "APIConnectionError":
        cause = error.__cause__ or error
        if "refused" in str(cause) or type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
            return f"nothing answers at {base} ({cause}): start the server (`qrecipe serve`), or mend base_url."
        return f"the connection to {base} broke ({cause}): the server was stopped or died; its log says which."
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) or name == "APIResponseValidationError":
        return f"{base} sent something that is not JSON: is it {v1}, and does base_url end in /v1?"
    return f"{base} reported an error: {said}."


def _said(error: Exception) -> str:
    """The server's own message, without the client's wrapping."""
    body = getattr(error, "body", None)
    body = body.get("error", body) if isinstance(body, dict) else body
    message = body.get("message", body.get("detail")) if isinstance(body, dict) else None
    text = str(message or getattr(error, "message", None) or error or type(error).__name__)
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= 300 else text[:297] + "..."


def _bad_request(said: str, status: int) -> str:
    """vLLM 0.27.0's own words for what does not fit, with both numbers and the mend; other words as they are."""
    larger = "or serve with a larger --max-model-len."
    if found := re.search(r"maximum context length (?:is |\()(\d+)", said):
        counts = re.search(r"(?:(?:requested )?(\d+) output tokens and your prompt contains|Input length \(|requested) ?"
                           r"(at least )?(\d+) ?(characters)?", said)  # fmt: skip
        asked, least, held, letters = counts.groups() if counts else (None,) * 4
        room = int(found[1]) - int(held or 0)
        unit = "characters, too many for any" if letters else "tokens"
        mend = "shorten the prompt"
        if least:  # it stopped counting at the limit
            mend += ", ask for less with max_tokens"
        elif letters and int(asked or 0) >= int(found[1]):  # no room for any prompt: it was not counted
            unit, mend = "characters", "ask for less with max_tokens"
        elif not letters and 0 < room < int(asked or 0):
            mend = f"ask for at most {room} with max_tokens"
        return (f"the prompt ({least or ''}{held or 0} {unit}) and max_tokens={asked or 0} do not fit the context of "
                f"{found[1]} tokens: {mend}, {larger}")  # fmt: skip
    if found := re.search(r"max_tokens=(\d+) cannot be greater than max_model_len=\D*(\d+)", said):
        return (f"max_tokens={found[1]} is more than the whole context of {found[2]} tokens, and the prompt must fit in "
                f"as well: ask for less, {larger}")  # fmt: skip
    if found := re.search(r"At most (\d+) (\w+)\(s\) may be provided", said):
        return (f"the server takes at most {found[1]} {found[2]}(s) in one prompt: send fewer, or serve with "
                f"--limit-mm-per-prompt '{{\"{found[2]}\": N}}'.")  # fmt: skip
    if "local files" in said or "allowed domains" in said:
        return f"the server fetches no picture from there ({status}: {said}): send the picture itself, as qrecipe.vision.data_url makes it."
    return f"the server refused the request ({status}): {said}."
