"""Checks of options, each with an error that names the option and what it may be."""

from __future__ import annotations

from collections.abc import Sequence


def at_least(least: float, **options: float | None) -> None:
    """Raise ``ValueError`` for the first option below ``least``; None passes."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def one_of(known: Sequence[str], **options: str) -> None:
    """Raise ``ValueError`` for the first option whose value is not among ``known``."""
    for name, value in options.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got '{value}'")


def head_sizes(d_model: int, n_heads: int, n_kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Key-value heads (by default ``n_heads``) and head size (by default ``d_model / n_heads``).

    Raises:
        ValueError: If one is below 1, or heads do not divide what they must.
    """
    at_least(1, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if n_heads % n_kv_heads:
        raise ValueError(f"n_kv_heads ({n_kv_heads}) must divide n_heads ({n_heads})")
    if head_dim is None and d_model % n_heads:
        raise ValueError(f"n_heads ({n_heads}) must divide d_model ({d_model}), or give head_dim")
    return n_kv_heads, d_model // n_heads if head_dim is None else head_dim
