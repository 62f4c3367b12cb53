"""How many examples a property test tries: its own number, or QRECIPE_EXAMPLES (10000 for a long run)."""

import os


def examples(usual: int) -> int:
    return int(os.environ.get("QRECIPE_EXAMPLES", usual))
