"""The private torch._inductor and torch._dynamo APIs that inductor_ext uses, and no other file.

Tested with torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Callable:
    return compile_fx(graph, inputs, config_patches=options.get("options"))
