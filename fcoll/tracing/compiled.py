"""What torch.compile makes of a program: AOTAutograd's graphs, recorded as they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fcoll.graph.origin import Origin
from fcoll.source import user_frames
from fcoll.tracing import _torch
from fcoll.tracing.recorder import Recorder


def compiled(fn: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """fn under torch.compile with a backend whose graphs, when they run, are recorded op by op."""

    def compiler(phase: str) -> Callable[..., Any]:
        def compile(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            run = _Recorded(graph_module, recorder, phase).run_recorded
            return _torch.boxed(run)

        return compile

    def step(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # Code of its own, which torch.compile's results for it go away with.
    fresh = FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
    return torch.compile(fresh, backend=_torch.aot_backend(compiler("fwd"), compiler("bwd")))


class _Recorded(fx.Interpreter):
    """Runs a graph under the recorder, telling it where each node comes from."""

    def __init__(self, graph_module: fx.GraphModule, recorder: Recorder, phase: str) -> None:
        super().__init__(graph_module)
        self.recorder, self.phase = recorder, phase

    def run_recorded(self, *args: Any) -> Any:
        with self.recorder, torch.no_grad():
            results = self.run(*args)
        if self.phase == "bwd":  # autograd may copy them: nothing that is recorded uses them
            self.recorder.results += [x for x in results if isinstance(x, torch.Tensor)]
        return results

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.given = _origin(n, self.phase)
        try:
            return super().run_node(n)
        finally:
            self.recorder.given = None


def _origin(node: fx.Node, phase: str) -> Origin:
    frames = user_frames(node.meta.get("stack_trace"))
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "")
    return Origin(frames, module_path(path), phase)


def module_path(path: str) -> str:
    """A module's path as Dynamo writes it -> as named_modules does.

    >>> module_path("L['self'].layers.0.wq"), module_path("L['model']._modules['layers']['0']")
    ('layers.0.wq', 'layers.0')
    """
    path = re.sub(r"^[LG]\['\w+'\](\.cell_contents)?|^self\b", "", path)
    path = re.sub(r"\._modules|\.parametrizations.*", "", path)
    return re.sub(r"\['?(\w+)'?\]", r".\1", path).strip(".")
