"""Compiles Triton kernels for GPUs that are not here, and reads what the code asks of them.

`recorded` catches the launches of a function that is called with tensors on the meta device, so that what is compiled
is exactly what would run: block sizes, warps, strides, alignments. That the function runs on the meta device also
proves that it never waits for the GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one block may have (CUDA C++ Programming Guide, table of technical specifications by
compute capability; for gfx942 the local data share of the CDNA 3 ISA guide)."""


@dataclass(frozen=True)
class Resources:
    """What one kernel asks of a GPU.

    Attributes:
        shared: Bytes of shared memory a block.
        registers: Registers a thread.
        spilled: Bytes a thread (NVIDIA: of its stack frame; AMD: 4 for each vector register) that did not fit them.
    """

    shared: int
    registers: int
    spilled: int


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its arguments, and options such as ``num_warps``."""

    kernel: JITFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return self.kernel.fn.__name__

    def resources(self, target: str) -> Resources:
        """Compile as the launch would on that target."""
        kernel, kwargs = self.kernel, {"debug": False, "enable_fp_fusion": True, **self.kwargs}
        backend = make_backend(TARGETS[target])
        bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
            *self.args, **kwargs
        )
        options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=TARGETS[target], options=options.__dict__)
        shared = compiled.metadata.shared
        if target.startswith("sm_"):
            usage = _usage(compiled.asm["cubin"])
            return Resources(shared, int(_field(r"REG:(\d+)", usage)), int(_field(r"STACK:(\d+)", usage)))
        code = compiled.asm["amdgcn"]
        registers, spilled = (int(_field(rf"\.vgpr_{n}:\s+(\d+)", code)) for n in ("count", "spill_count"))
        return Resources(shared, registers, 4 * spilled)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches inside the block, none of which happens."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def _usage(cubin: bytes) -> str:
    """What cuobjdump (it comes with Triton) says of the only function in it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout


def _field(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in\n{text}"
    return match[1]
