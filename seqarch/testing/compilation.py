"""``torch.compile`` changes nothing but the speed."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from seqarch.testing.compare import ContractError, relative_rms, token_error
from seqarch.testing.subject import Subject, gradients


def check_compile(subject: Subject) -> None:
    """Compiled, in one graph if the tag ``fullgraph`` says so, outputs and gradients are those of eager mode."""
    dtype = torch.float32 if torch.float32 in subject.tags.dtypes else subject.dtype
    stack = subject.build(dtype)
    x = subject.noise(2, subject.T, dtype=dtype).requires_grad_()
    dy = subject.noise(2, subject.T, dtype=dtype, seed=4)
    torch.compiler.reset()
    compiled: Any = torch.compile(stack, fullgraph=subject.tags.fullgraph)
    try:
        with warnings.catch_warnings():
            # Dynamo itself looks at the gradient of what crosses a break in the graph.
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
            # Dynamo makes an instance of an autograd function to trace it.
            warnings.filterwarnings("ignore", r".*Function'> should not be instantiated", DeprecationWarning)
            y = compiled(x)[0]
            dx = gradients(stack, y, dy, x)["x"]
    except Exception as e:
        first = (str(e).strip().splitlines() or [""])[0]
        raise ContractError(
            f"compile: torch.compile(fullgraph={subject.tags.fullgraph}) fails: {type(e).__name__}: {first}"
        ) from e
    finally:
        torch.compiler.reset()
    expected = stack(x)[0]
    measure = token_error if subject.tags.discontinuous else relative_rms
    errors = {"output": measure(y, expected), "input gradient": measure(dx, gradients(stack, expected, dy, x)["x"])}
    for name, error in errors.items():
        if not error <= 1e-4:
            raise ContractError(f"compile: the {name} differs from eager mode by {error:.3g}, above 1e-4")
