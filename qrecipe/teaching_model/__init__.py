"""A tiny model with Qwen3.5's architecture and tokenizer that knows this book's answers by heart.

It makes the whole book run without a GPU: 17 million parameters, of which the trained part is in this package and the
rest comes from a fixed generator. Serve the folder that `build` writes as you would serve the real model.
"""

from .answers import ANSWERS, Answer, answer, answers
from .build import build, config, exact_shape_dir

__all__ = ["ANSWERS", "Answer", "answer", "answers", "build", "config", "exact_shape_dir"]
