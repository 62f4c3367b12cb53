"""The gated delta rule in chunks, for training on a CPU.

Same result as the reference in transformers. Its triangular solve is slow on a CPU for many small matrices, so the
inverse of the unit triangular matrix I + L is written as a product instead: L has no power beyond its size, so
(I + L)^-1 = (I - L)(I + L^2)(I + L^4)…, a handful of batched multiplications.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _unit_triangular_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular matrices [..., n, n]."""
    size, power, reach = lower.shape[-1], -lower, 2
    inverse = torch.eye(size, device=lower.device) + power
    while reach < size:
        power = power @ power
        inverse = inverse + inverse @ power
        reach *= 2
    return inverse


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 32, **_
) -> tuple[Tensor, None]:
    """Output [batch, tokens, heads, value_dim]; queries and keys are l2-normalized here, no state is carried in or out.

    query, key, value: [batch, tokens, heads, dim]; g (log of the decay, at most 0) and beta: [batch, tokens, heads].
    """
    tokens, dim = key.shape[1], key.shape[-1]
    pad = -tokens % chunk_size
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, pad)).unflatten(2, (-1, chunk_size)) for x in (query, key, value))
    decay, beta = (F.pad(x.transpose(1, 2), (0, pad)).unflatten(2, (-1, chunk_size)) for x in (g, beta))
    q, k = F.normalize(q, dim=-1, eps=1e-3) * dim**-0.5, F.normalize(k, dim=-1, eps=1e-3)

    total = decay.cumsum(-1)  # log decay since the chunk's start
    past = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=g.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~past, float("-inf")).exp()
    k_t = k.transpose(-1, -2)
    inverse = _unit_triangular_inverse(((k @ k_t) * between * beta[..., None]).tril(-1))
    new = inverse @ (v * beta[..., None])
    seen = inverse @ (k * (beta * total.exp())[..., None])
    inside = (q @ k_t) * between
    q_old = q * total.exp()[..., None]
    k_last = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    whole = total[..., -1].exp()[..., None, None]

    out, state = [], None
    for n in range(q.shape[2]):
        if state is None:
            delta = new[:, :, n]
            out.append(inside[:, :, n] @ delta)
            state = k_last[:, :, n] @ delta
        else:
            delta = new[:, :, n] - seen[:, :, n] @ state
            out.append(q_old[:, :, n] @ state + inside[:, :, n] @ delta)
            state = state * whole[:, :, n] + k_last[:, :, n] @ delta
    return torch.cat(out, dim=2)[:, :, :tokens].transpose(1, 2).contiguous(), None
