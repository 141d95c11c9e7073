"""Continuing several prompts of different lengths at once, with the mixers' state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seqarch.evaluation.generation import PREFILL
from seqarch.model import SequenceModel


@torch.inference_mode()
def generate_batch(
    model: SequenceModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    ends: Callable[[list[int]], bool],
) -> list[list[int]]:
    """Continue each prompt.

    All rows stand at the same position and no row ever sees padding, which a recurrent state would keep: the part that
    the shortest prompt covers is read at once, then a row takes its prompt's next token as long as there is one, and
    its own choice after that.

    Args:
        model: The model; its device is used.
        prompts: Token ids, at least one each. Lengths that differ by k cost k steps of one token.
        max_new_tokens: How many tokens to draw for each at the most.
        choose: Maps logits ``[B, V]`` to the next tokens ``[B]``.
        ends: Whether a row ends after these new tokens; the last of them is kept.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: For an empty prompt.
    """
    lengths = [len(p) for p in prompts]
    if not lengths or min(lengths) == 0:
        raise ValueError("a prompt is empty: give at least one token")
    device = model.embedding.weight.device
    state = model.init_state(len(prompts), max(lengths) + max_new_tokens, device=device)
    logits = torch.empty(0)  # replaced below: no prompt is empty
    common = torch.tensor([p[: min(lengths)] for p in prompts], device=device)
    for chunk in common.split(PREFILL, dim=1):
        logits, state = model(chunk, state=state, last_only=True)
    new: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    position = min(lengths)
    while True:
        following = choose(logits[:, -1]).tolist()
        for row, prompt in enumerate(prompts):
            if position < len(prompt):
                following[row] = prompt[position]
            elif not done[row]:
                new[row].append(following[row])
                done[row] = len(new[row]) == max_new_tokens or ends(new[row])
        if all(done):
            return new
        position += 1
        logits, state = model(torch.tensor(following, device=device)[:, None], state=state, last_only=True)
