"""A vLLM general plugin that makes the CPU engine's start shorter: tokenizers are shared, not deep-copied.

While transformers loads the processor it deep-copies a tokenizer of 248,077 entries many times over; on two cores that
is most of the multimodal warm-up. A tokenizer that is never changed can stand for its own copy. vLLM loads this
through its entry point `vllm.general_plugins` in each of its processes; it acts only where QRECIPE_SHARE_TOKENIZER=1.
"""

import os


def register() -> None:
    """Give fast tokenizers a `__deepcopy__` that returns the tokenizer itself."""
    if os.environ.get("QRECIPE_SHARE_TOKENIZER") != "1":
        return
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    def share(self, memo):
        return self

    PreTrainedTokenizerBase.__deepcopy__ = share
    try:
        Tokenizer.__deepcopy__ = share
    except TypeError:  # an extension type that takes no new attributes
        pass
