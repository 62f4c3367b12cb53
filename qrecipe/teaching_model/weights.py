"""Tensors of the checkpoint as bytes: a counter-based generator for the untrained rows, and the safetensors files.

Everything here is integer arithmetic on bfloat16 bit patterns, so the same bytes come out on every machine and with
every version of numpy. A bfloat16 is a sign bit, 8 exponent bits and 7 mantissa bits: the upper half of a float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, TensorSpec, deserialize, serialize_file

from qrecipe.errors import BadInput

EMBEDDING = "model.language_model.embed_tokens.weight"
POSITIONS = "model.visual.pos_embed.weight"
ROWS, IDS = "embedding_rows", "embedding_ids"  # the trained rows of the embedding and their token ids
SEED = 35  # of the generator; another value is another checkpoint


def splitmix64(counter: np.ndarray, seed: int) -> np.ndarray:
    """SplitMix64's output for every value of `counter` (uint64): 64 well-mixed bits each, from the counter alone."""
    with np.errstate(over="ignore"):
        z = (counter + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def generated_rows(ids: np.ndarray, width: int) -> np.ndarray:
    """Embedding rows that were never trained, uint16 bfloat16 bits [len(ids), width].

    Signs and mantissas are random, the exponent is one of two, so each value's size lies in [1/128, 1/32): small
    beside the trained rows, so no such token is ever the likeliest one.
    """
    words = width // 4  # one 64-bit output makes four values
    counter = np.asarray(ids, np.uint64)[:, None] * np.uint64(words) + np.arange(words, dtype=np.uint64)
    raw = splitmix64(counter, SEED).astype("<u8").view("<u2")
    exponent = np.uint16(120) + ((raw >> np.uint16(7)) & np.uint16(1))
    return (raw & np.uint16(0x807F)) | (exponent << np.uint16(7))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write uint16 arrays as BF16 and int32 arrays as I32, always the same bytes."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    kinds = {"uint16": "bfloat16", "int32": "int32"}
    specs = {
        name: TensorSpec(
            dtype=kinds[array.dtype.name], shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it readable for its owner alone


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_safetensors` wrote: BF16 comes back as uint16 bits."""
    try:
        tensors = deserialize(path.read_bytes())
    except SafetensorError as problem:
        raise BadInput(f"{path.name} is cut short or damaged ({problem}); install qrecipe again.") from None
    kinds = {"BF16": "<u2", "I32": "<i4"}
    return {name: np.frombuffer(t["data"], kinds[t["dtype"]]).reshape(t["shape"]) for name, t in tensors}


def assemble(trained: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    """All tensors of model.safetensors: the trained ones, and the generated embedding with the trained rows in it."""
    text, vision = config["text_config"], config["vision_config"]
    embedding = generated_rows(np.arange(text["vocab_size"]), text["hidden_size"])
    embedding[trained[IDS]] = trained[ROWS]
    tensors = {name: bits for name, bits in trained.items() if name not in (ROWS, IDS)}
    tensors[EMBEDDING] = embedding
    # No learned positions: a figure is the same figure wherever it stands.
    tensors[POSITIONS] = np.zeros((vision["num_position_embeddings"], vision["hidden_size"]), np.uint16)
    return tensors
