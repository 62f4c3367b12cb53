"""Plans on more than one card: which splits and copies of a model hold a need, and the commands that start them.

The order of ranks and the commands are those of vLLM 0.27.0: tensor parallelism splits every layer, pipeline parallelism
deals out whole layers, data parallelism copies the engine and shares out the requests.
"""

import shlex
from dataclasses import dataclass
from itertools import product
from typing import Any

from qrecipe.cards import Card, find_card
from qrecipe.checks import check_number
from qrecipe.errors import RecipeError
from qrecipe.memory import Budget, fitting

SIZES = (1, 2, 4, 8, 16)
MASTER = "MASTER"  # stands for the first host's address in commands for several hosts
RAY_PORT, RPC_PORT = 6379, 13345


@dataclass(frozen=True)
class Plan:
    """One way to serve: `copies` engines (data parallel), each of `tensor` × `stages` ranks, on `cards` cards of `hosts` hosts.

    budget: figures of the tightest rank, in GiB. requests and tokens: of all copies together.
    """

    card: Card | None
    tensor: int
    stages: int
    copies: int
    hosts: int
    budget: Budget

    @property
    def cards(self) -> int:
        return self.tensor * self.stages * self.copies

    @property
    def requests(self) -> float:
        return self.copies * (self.budget.max_concurrency or 0.0)

    @property
    def tokens(self) -> int:
        return self.copies * (self.budget.kv_cache_tokens or 0)

    @property
    def kind(self) -> str:
        words = {"split": self.tensor > 1, "staged": self.stages > 1, "copied": self.copies > 1}
        return " and ".join(word for word, yes in words.items() if yes) or "one card"

    def row(self) -> dict[str, Any]:
        """One line of a table: sizes, then GiB and tokens of a rank, then what all ranks hold together."""
        b = self.budget
        return {
            "card": self.card.name if self.card else "", "cards": self.cards, "hosts": self.hosts, "how": self.kind,
            "TP": self.tensor, "PP": self.stages, "DP": self.copies, "weights a rank, GiB": b.weights_gib,
            "KV pool a rank, GiB": b.available_kv_gib, "KV tokens a copy": b.kv_cache_tokens,
            "KV tokens in all": self.tokens, "requests at once": self.requests,
        }  # fmt: skip

    def commands(self, model: str, ray: bool = False) -> list[tuple[str, str]]:
        """(host, command) to copy: one line on one host; on several, what each is given. MASTER: the first host.

        ray: an engine over several hosts by a Ray cluster, instead of by vLLM's own `--nnodes`.
        """
        flags = {"--max-model-len": self.budget.max_model_len, "--max-num-seqs": self.budget.flags.max_num_seqs}
        flags |= {"--gpu-memory-utilization": self.budget.flags.gpu_memory_utilization}
        sizes = {"--tensor-parallel-size": self.tensor, "--pipeline-parallel-size": self.stages}
        sizes |= {"--data-parallel-size": self.copies}
        flags |= {flag: size for flag, size in sizes.items() if size > 1}
        words = ["vllm", "serve", model, *[str(w) for flag, value in flags.items() if value for w in (flag, value)]]
        if self.hosts == 1:
            return [("this host", shlex.join(words))]
        if ray and self.copies == 1:
            return [
                ("first host", f"ray start --head --port {RAY_PORT}"),
                ("each other host", f"ray start --address {MASTER}:{RAY_PORT}"),
                ("first host, then", shlex.join([*words, "--distributed-executor-backend", "ray"])),
            ]
        local = self.copies // self.hosts
        if local:
            words += ["--data-parallel-size-local", str(local), "--data-parallel-address", MASTER]
            words += ["--data-parallel-rpc-port", str(RPC_PORT)]
        else:
            words += ["--nnodes", str(self.hosts), "--master-addr", MASTER]
        lines = []
        for n in range(self.hosts):
            rank = ["--data-parallel-start-rank", str(n * local)] * (n > 0) if local else ["--node-rank", str(n)]
            lines.append((f"host {n + 1}", shlex.join([*words, *rank, *["--headless"] * (n > 0)])))
        return lines


def plans(
    model: Any, *, cards: list, requests: float = 1.0, most: int = 8, per_host: int = 8, **settings: Any
) -> list[Plan]:
    """Every plan on up to `most` of one of `cards` that holds `requests` requests of full length at once, fewest cards first.

    The smallest plan of each kind a card, with as many copies as the need takes; of all cards with `most` 1 the smallest card
    that does comes first. `per_host`: cards in one host; tensor parallelism never leaves a host. `settings`: as for
    `memory.budget`. Raises BadInput for a need that is no number above zero,
    and whatever `memory.budget` says when no split is possible at all.
    """
    check_number(requests, "requests", 1e-9, 10**6, float)
    check_number(most, "most", 1, 10**5, hint=" (cards)")
    check_number(per_host, "per_host", 1, 10**5, hint=" (cards)")
    found: list[Plan] = []
    refused, possible = None, False
    known = [c if isinstance(c, Card) else find_card(c) for c in ([cards] if isinstance(cards, (str, Card)) else cards)]
    for card, tensor, stages in product(known, SIZES, SIZES):
        if tensor * stages > most or tensor > per_host:
            continue
        here = settings | {"gpu": card, "tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        try:
            one = fitting(model, **here)
        except RecipeError as e:
            refused = e
            continue
        possible = True
        if not one.fits:
            continue
        copies = max(1, -int(-requests // one.max_concurrency))
        total = tensor * stages * copies
        hosts = -(-total // per_host)
        if total <= most and total % hosts == 0 and (copies == 1 or copies % hosts == 0):
            found.append(Plan(card, tensor, stages, copies, hosts, one))
    if refused and not possible:
        raise refused
    best: dict[tuple, Plan] = {}
    for plan in sorted(found, key=lambda p: (p.cards, p.hosts, p.stages, p.tensor)):
        best.setdefault((plan.card.name, plan.kind), plan)
    return list(best.values())
