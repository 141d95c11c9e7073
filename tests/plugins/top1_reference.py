"""Top-1 Element and Top-1 Chunk straight from their formulas: every score written out, gradients by autograd."""

import torch


def repeat_heads(q, *tensors):
    """One key-value head for each query head."""
    return [t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in tensors]


def one_hot(index, n, like):
    return (index[..., None] == torch.arange(n)).to(like.dtype)


def element(q, k, v, scale):
    """q [B, T, H, D], k and v [B, T, G, D] to [B, T, H, D]."""
    k, v = repeat_heads(q, k, v)
    T = q.shape[1]
    s = torch.einsum("bthd,bjhd->bhtj", q, k) * scale
    s = s.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    p = s.softmax(-1)
    w = one_hot(s.argmax(-1), T, s) + (p - p.detach())
    return torch.einsum("bhtj,bjhd->bthd", w, v)


def chunk(q, k, v, scale, chunk_size, selection, local=True, select="chunk"):
    """As ``element``; also the chunk of each query ``[B, H, T]``, -1 for none."""
    k, v = repeat_heads(q, k, v)
    T, C = q.shape[1], chunk_size
    N = -(-T // C)
    t, m = torch.arange(T), torch.arange(N)
    n = t // C
    s = torch.einsum("bthd,bjhd->bhtj", q, k) * scale
    visible = t[None] <= t[:, None]
    inside = n[None] == m[:, None]  # [N, T]: token j is in chunk m
    seen = visible[:, None] & inside  # [T, N, T]
    candidate = m[None] < n[:, None]
    if not local:
        candidate = candidate | (m[None] == n[:, None])
    by_chunk = s[:, :, :, None]  # [B, H, T, 1, T]
    if selection == "exact":
        logit = by_chunk.masked_fill(~seen, -1e30).logsumexp(-1)
    else:
        count = seen.sum(-1)
        logit = (by_chunk * seen).sum(-1) / count.clamp(min=1) + (count.clamp(min=1) / C).log()
    chosen = logit.masked_fill(~candidate, -torch.inf).argmax(-1)  # [B, H, T]
    P = logit.masked_fill(~candidate, -1e30).softmax(-1).gather(-1, chosen[..., None])
    any_candidate = candidate.any(-1)
    chosen = torch.where(any_candidate, chosen, -1)
    in_chosen = (n == chosen[..., None]) & visible
    region = in_chosen | (visible & (n[None] == n[:, None]) if local else torch.tensor(False))
    s = s.masked_fill(~region, -torch.inf)
    w = s.softmax(-1)
    if select == "element":
        w = one_hot(s.argmax(-1), T, s) + (w - w.detach())
    gain = torch.where(any_candidate[:, None], 1 + P - P.detach(), 1.0)
    return torch.einsum("bhtj,bjhd->bthd", torch.where(in_chosen, w * gain, w), v), chosen
