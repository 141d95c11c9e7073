"""Bytes that operators have allocated and that are still held."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator makes, until it is freed; works on fake tensors, which hold no memory.

    Args:
        known: Tensors that are there already, and do not count.
        made_up_products: Fill the results of matrix products (of linear layers, not batched ones) with noise instead of
            computing them: what is held seldom depends on values, and the products are what takes time.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, made_up_products: bool = False) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are held."""
        self.peak = 0
        """The most bytes that were held at one time."""
        self.operators = 0
        """How many operators were called."""
        self._made_up_products = made_up_products
        self._sizes = {t.untyped_storage()._cdata: 0 for t in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.operators += 1
        if self._made_up_products and func is torch.ops.aten.mm.default:
            a, b = args
            out = a.new_empty(a.shape[0], b.shape[1]).normal_()
        else:
            out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._add(t)
        return out

    def _add(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
