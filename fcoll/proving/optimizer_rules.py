"""What is special about optimizers: fused ones and gradient scalers in plain words, and cuts around
their steps.

A cut replaces gradients before a step, and parameters and states after it, by uninterpreted
functions of themselves, in both programs, so that degrees start anew: equal for every function is
equal for the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fcoll.proving import _torch
from fcoll.proving.algebra import Algebra
from fcoll.proving.lists import at_once


def _adam(
    param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, most: Any, step: int, **how: Any
) -> None:
    """As _single_tensor_adam of torch."""
    lr, beta1, beta2 = how["lr"], how["beta1"], how["beta2"]
    grad = -grad if how["maximize"] else grad
    if how["weight_decay"] and how["decoupled"]:
        param.mul_(1 - lr * how["weight_decay"])
    elif how["weight_decay"]:
        grad = grad.add(param, alpha=how["weight_decay"])
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if how["amsgrad"]:
        square = most.copy_(torch.maximum(most, square))
    below = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(how["eps"])
    param.sub_(mean / below * (lr / (1 - beta1**step)))


def _fused_adam(decoupled: bool, *lists: Any, **how: Any) -> None:
    params, grads, means, squares, mosts, steps = lists
    grads = _unscaled(grads, how)
    how["decoupled"] = decoupled
    for i, param in enumerate(params):
        most = mosts[i] if mosts else None
        _adam(param, grads[i], means[i], squares[i], most, int(steps[i].item()), **how)


def _fused_sgd(params: Any, grads: Any, buffers: Any, **how: Any) -> None:
    grads = _unscaled(grads, how)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        grad = -grad if how["maximize"] else grad
        if how["weight_decay"]:
            grad = grad.add(param, alpha=how["weight_decay"])
        if how["momentum"]:
            if how["is_first_step"]:
                buffers[i].copy_(grad)
            else:
                buffers[i].mul_(how["momentum"]).add_(grad, alpha=1 - how["dampening"])
            nesterov = how["nesterov"]
            grad = grad.add(buffers[i], alpha=how["momentum"]) if nesterov else buffers[i]
        param.sub_(grad * how["lr"])


def _fused_adagrad(params: Any, grads: Any, sums: Any, steps: Any, **how: Any) -> None:
    grads = _unscaled(grads, how)
    for param, grad, total, step in zip(params, grads, sums, steps, strict=True):
        grad = -grad if how["maximize"] else grad
        if how["weight_decay"]:
            grad = grad.add(param, alpha=how["weight_decay"])
        rate = how["lr"] / (1 + (int(step.item()) - 1) * how["lr_decay"])
        total.addcmul_(grad, grad, value=1)
        param.addcdiv_(grad, total.sqrt().add_(how["eps"]), value=-rate)


def _unscaled(grads: Any, how: dict[str, Any]) -> Any:
    """Of a GradScaler, which the op divides by. Elements are finite: none is left out."""
    scale = how.get("grad_scale")
    if scale is None:
        return grads
    for grad in grads:
        grad.div_(scale)
    return grads


def _unscale(grads: Any, found_inf: Tensor, inverse_scale: Tensor) -> None:
    for grad in grads:
        grad.mul_(inverse_scale)


def _update_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """Grows after so many steps, all of which had finite gradients."""
    tracker.add_(1)
    if int(tracker.item()) == interval:
        scale.mul_(growth)
        tracker.zero_()
    return scale


FUSED: dict[str, Callable[..., Any]] = {
    "_fused_adam_": lambda *lists, **how: _fused_adam(False, *lists, **how),
    "_fused_adamw_": lambda *lists, **how: _fused_adam(True, *lists, **how),
    "_fused_sgd_": _fused_sgd,
    "_fused_adagrad_": _fused_adagrad,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_amp_update_scale_": _update_scale,
}


@contextmanager
def cut_around_steps(
    optimizers: Iterable[torch.optim.Optimizer], algebra: Algebra
) -> Iterator[None]:
    def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def cut(tensors: Iterable[Any]) -> None:
        with _torch.raw():
            floats = [x for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]
            parts = [_torch.local_of(x).detach() for x in floats]
            numbers = [x for x in parts if not x.dim()]  # some count steps
            for x in numbers:
                x.copy_(algebra.cut(x))
            many = [x for x in parts if x.dim()]
            for x, value in zip(many, at_once(algebra.cut, many), strict=True):
                x.copy_(value)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        cut(p.grad for p in params_of(optimizer))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = params_of(optimizer)
        states = (x for p in params for x in optimizer.state.get(p, {}).values())
        cut((*params, *states))

    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.register_step_pre_hook(before).remove)
            stack.callback(optimizer.register_step_post_hook(after).remove)
        yield
