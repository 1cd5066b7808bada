"""The compiler half of fcoll: what TorchInductor makes of functional collectives.

``torch.compile(model, backend="fcoll")`` compiles with Inductor, to which fcoll's collectives are
what torch's own are: extern kernels whose buffers live until the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
    """The ``torch.compile`` backend named "fcoll"."""
    from inductor_ext._torch import compile_with_inductor

    return compile_with_inductor(graph, inputs, **options)
