"""Runs the real Triton kernels of flash-linear-attention without a GPU, in Triton's interpreter.

A process of its own does it, since the interpreter is chosen when triton is imported and the patches below are not for
the process that runs the tests. It takes seconds to start (fla's imports), so that it is kept for further calls.

Written for triton 3.8 and 3.9 and for fla 0.6. Keep shapes tiny: the interpreter runs one program of the grid after the
other in numpy. bfloat16 is not reliable there.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


def interpreted(
    function: str, kwargs: dict[str, Any], grads: Sequence[Tensor | None] | None = None
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """Call a function in a process with TRITON_INTERPRET=1.

    Skips the test where triton or fla is not installed (there is no triton for macOS and Windows).

    Args:
        function: ``package.module:name``.
        kwargs: Its arguments: CPU tensors, numbers, strings, None.
        grads: The gradient of each output, None for an output without one; asks for those of the arguments.

    Returns:
        The outputs, nested tuples flattened; and by name, the gradient of every argument with ``requires_grad`` that
        has one.

    Raises:
        RuntimeError: With the process's messages, if it failed.
    """
    for package in ("triton", "fla"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    leaves = {
        name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request.pt"), Path(folder, "answer.pt")
        torch.save({"function": function, "kwargs": leaves, "grads": grads}, request)
        if error := _process().serve(f"{request}\t{answer}"):
            _process.cache_clear()
            raise RuntimeError(f"{function} failed in the interpreter:\n{error}")
        result = torch.load(answer)
    return result["outputs"], result["grads"]


class _Process:
    """Serves calls, a line each, until one fails; ends when its input closes, with the process that started it."""

    def __init__(self) -> None:
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process runs)
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreter"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            text=True,
        )

    def serve(self, line: str) -> str | None:
        """The messages of the process if it failed, else None."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line + "\n")
        stdin.flush()
        if stdout.readline():
            return None
        self.process.communicate()
        with self.messages:
            self.messages.seek(0)
            return self.messages.read()


@cache
def _process() -> _Process:
    return _Process()


# --- in that process --------------------------------------------------------------------------------------------------


def _patch_triton() -> None:
    """Take an autotuner's first configuration unmeasured, and count loops in int32 scalars as the compiler does.

    Call it before fla is imported.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = property(lambda self: lambda *args, **kwargs: [0.0, 0.0, 0.0])

    def range_of_scalars(*bounds: Any, **hints: Any) -> Iterator[tl.tensor]:
        for i in range(*(int(b) for b in bounds)):
            yield interpreter.interpreter_semantic.to_tensor(i, False)

    def visit_for(self: ast.NodeTransformer, node: ast.For) -> ast.AST:
        if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) in ("range", "tl.range"):
            node.iter.func = ast.Name(id="range_of_scalars", ctx=ast.Load())
        return self.generic_visit(node)

    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = dot_of_values  # else it multiplies the bits of bfloat16 as integers
    # A kernel finds there what its source does not name.
    interpreter.range_of_scalars = range_of_scalars
    interpreter.ASTTransformer.visit_For = visit_for
    # fla binds the name at import, where the interpreter's own patch of tl does not reach.
    tl.gather = partial(tl.gather, _semantic=interpreter.interpreter_semantic)


def _flat(outputs: Any) -> list[Tensor | None]:
    if isinstance(outputs, (tuple, list)):
        return [tensor for output in outputs for tensor in _flat(output)]
    return [outputs]


def _answer(request: str, answer: str) -> None:
    call = torch.load(request)
    module, name = call["function"].split(":")
    kwargs = call["kwargs"]
    outputs = _flat(getattr(importlib.import_module(module), name)(**kwargs))
    if call["grads"] is not None:
        pairs = [(o, g) for o, g in zip(outputs, call["grads"], strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    grads = {n: t.grad for n, t in kwargs.items() if isinstance(t, Tensor) and t.grad is not None}
    detached = [None if o is None else o.detach() for o in outputs]
    torch.save({"outputs": detached, "grads": grads}, answer)


def _main() -> None:
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    _patch_triton()
    for line in sys.stdin:
        _answer(*line.rstrip("\n").split("\t"))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    _main()
