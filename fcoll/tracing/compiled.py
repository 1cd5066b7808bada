"""What torch.compile makes of a program: AOTAutograd's graphs, recorded as they run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fcoll.graph.origin import Origin
from fcoll.source import user_frames
from fcoll.tracing import _torch
from fcoll.tracing.recorder import Recorder


@contextmanager
def compiled(
    fn: Callable[..., Any], modules: Sequence[torch.nn.Module] | None, recorder: Recorder
) -> Iterator[Callable[..., Any]]:
    """fn under torch.compile, or with these modules of it compiled, with a backend whose graphs,
    when they run, are recorded op by op. What runs between graphs is recorded as it runs."""
    backend = _torch.aot_backend(_compiler(recorder, "fwd"), _compiler(recorder, "bwd"))
    recorder.by_memory = True
    with warnings.catch_warnings(), _torch.compiled_anew(backend):
        # Dynamo looks at the loss's .grad where it resumes after the backward pass
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        if modules is None:
            yield torch.compile(_fresh(fn), backend=backend)
        else:
            with _torch.compiled_modules(modules, backend):
                yield fn


def _compiler(recorder: Recorder, phase: str) -> Callable[..., Any]:
    def compile(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _torch.boxed(_Recorded(graph_module, recorder, phase).run_recorded)

    return compile


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of fn with a code object of its own, so that torch.compile's cache goes with it."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)


class _Recorded(fx.Interpreter):
    """Runs a graph under the recorder, telling it where each node comes from."""

    def __init__(self, graph_module: fx.GraphModule, recorder: Recorder, phase: str) -> None:
        super().__init__(graph_module)
        self.recorder, self.phase = recorder, phase

    def run_recorded(self, *args: Any) -> Any:
        with torch.no_grad():
            return self.run(*args)

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.node_origin = _origin(n, self.phase)
        try:
            return super().run_node(n)
        finally:
            self.recorder.node_origin = None


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
