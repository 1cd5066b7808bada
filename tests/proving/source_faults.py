"""Programs with one thing wrong in their source: what is changed, and what must be said of it."""

from __future__ import annotations

import inspect
import linecache
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import programs_context
import programs_in_place
import programs_mixed
import programs_trained
from proved_programs import PROGRAMS, SINGLE

from fcoll.source import site_of

MORE = {
    **programs_in_place.PROGRAMS,
    **programs_context.PROGRAMS,
    **programs_trained.PROGRAMS,
    **programs_mixed.PROGRAMS,
}
MORE_SINGLE = programs_trained.SINGLE
RIGHT = {**PROGRAMS, **MORE}


@dataclass(frozen=True)
class Fault:
    program: str
    old: str
    new: str
    name: str  # of a difference
    said: str = ""  # of what is wrong or what would mend it; empty: it is not known
    also: str | tuple[str, ...] = ""  # in lines that are the right place, too, besides the changed
    is_placed_only: bool = False  # the line is right, and nothing is said that would mend it

    @property
    def title(self):
        return f"{self.program}: {self.new or 'nothing'}"

    def is_placed(self, line):
        """Is this, as verdicts show it, the line that is changed, or holds the text of ``also``? A
        gradient that is reduced wrongly after the backward pass is placed at its parameter."""
        file, number = site_of(line)
        source = Path(self._file()).read_text()
        changed = source[: source.index(self.old)].count("\n") + 1
        if Path(file).resolve() == Path(self._file()).resolve() and number == changed:
            return True
        also = (self.also,) if isinstance(self.also, str) else self.also
        return any(text and text in linecache.getline(file, number) for text in also)

    def _file(self):
        right = RIGHT[self.program][0]
        return inspect.getsourcefile(right.func if isinstance(right, partial) else right)

    def build(self):
        """The program with the text replaced, where it first is."""
        right = RIGHT[self.program][0]
        given = right.keywords if isinstance(right, partial) else {}
        function = right.func if isinstance(right, partial) else right
        source = inspect.getsource(inspect.getmodule(function))
        assert self.old in source, self.old
        module = types.ModuleType("faulty")
        module.__file__ = inspect.getsourcefile(function)
        code = compile(source.replace(self.old, self.new, 1), module.__file__, "exec")
        exec(code, module.__dict__)
        wrong = getattr(module, function.__name__)
        given = {k: getattr(module, getattr(v, "__name__", ""), v) for k, v in given.items()}
        if self.program == "ring_function":
            given["attend"] = module.RingFunction.apply
        return partial(wrong, **given)

    @property
    def mesh(self):
        return RIGHT[self.program][1]

    def one_device(self):
        """None: the faulty program itself, which is right there."""
        if self.program in MORE:
            return MORE_SINGLE.get(self.program)
        return SINGLE.get(self.program, PROGRAMS[self.program][0])


REDUCED = 'fcoll.all_reduce(p.grad, "avg", dp)'
MISSING, AVERAGE = 'an all-reduce over "{}" is missing', 'an average over "{}" is missing'
LARGE, SMALL = "2 times too large", "2 times too small"

FAULTS = [
    # data and tensor parallel by hand
    Fault("by_hand", REDUCED, 'fcoll.all_reduce(p.grad, "sum", dp)', "gradient of norm", LARGE,
          "x * self.norm"),
    Fault("by_hand", REDUCED, "p.grad", "gradient of norm", AVERAGE.format("dp"), "x * self.norm"),
    Fault("by_hand", REDUCED, 'fcoll.all_reduce(p.grad, "avg", mesh["tp"])', "gradient of norm",
          AVERAGE.format("dp"), "x * self.norm"),
    Fault("by_hand", REDUCED, REDUCED + " / dp.size()", "gradient of norm", SMALL, "x * self.norm"),
    Fault("by_hand", "Copy.apply(x * self.norm, self.tp)", "x * self.norm",
          "gradient of norm", MISSING.format("tp")),
    Fault("by_hand", '"sum", self.tp, grad="identity")', '"sum", self.tp)', "gradient of norm"),
    Fault("by_hand", '"sum", self.tp, grad="identity")', '"avg", self.tp, grad="identity")',
          "loss", SMALL),
    Fault("by_hand", "torch.randn(DIM, HIDDEN)", "torch.randn(DIM, HIDDEN).roll(1, 1)", "loss"),
    # accumulation
    Fault("ddp_accumulating", "loss = model(first).square().mean() / 2",
          "loss = model(first).square().mean()", "loss", "2 times what it should be"),
    Fault("ddp_accumulating", "        last = model(second)",
          "        model.require_backward_grad_sync = False; last = model(second)",
          "gradient of up.weight", AVERAGE.format("dp"), "self.up(x)"),
    Fault("fsdp_accumulating", "set_requires_gradient_sync(i == 1)",
          "set_requires_gradient_sync(i == 0)", "gradient of up.weight"),
    # losses over a vocabulary that is cut
    Fault("vocabulary_parallel", "first = self.tp.get_local_rank() * len(self.head)", "first = 0",
          "loss", "first = mesh", "here = "),
    Fault("vocabulary_parallel",
          "torch.where(here, logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), 0.0)",
          "logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)", "loss", "masked_fill(~here"),
    Fault("vocabulary_parallel",
          'fcoll.all_reduce(logits.exp().sum(-1), "sum", self.tp, grad="identity")',
          "logits.exp().sum(-1)", "loss", MISSING.format("tp")),
    Fault("vocabulary_parallel", 'fcoll.all_reduce(logits.detach().amax(-1), "max", self.tp)',
          "logits.detach().amax(-1)", "loss", 'fcoll.all_reduce(the result of amax, "max", tp)'),
    Fault("vocabulary_parallel", "Copy.apply(x, self.tp) @ self.head.t()", "x @ self.head.t()",
          "gradient of scale", MISSING.format("tp"), "x * scale"),
    Fault("vocabulary_parallel", "logits = Copy.apply(x, self.tp) @ self.head.t()",
          "logits = fcoll.all_gather_into_tensor(Copy.apply(x, self.tp) @ self.head.t(), self.tp,"
          " dim=-1)", "loss", "leaving out all_gather_into_tensor"),
    Fault("smoothed", "all_logits / VOCABULARY", "all_logits / len(self.head)", "loss",
          "the result of div by 1/2"),
    Fault("smoothed", "even = all_logits / VOCABULARY", "even = logits.mean(-1)", "loss",
          AVERAGE.format("tp")),
    Fault("smoothed", "(1 - self.smoothing) * picked",
          "(1 - self.smoothing * VOCABULARY / (VOCABULARY - 1)) * picked", "loss", "by 99/98"),
    Fault("vocabulary_embedding", "x.masked_fill(away.unsqueeze(-1), 0.0)", "x", "loss",
          "masked_fill(away", "F.embedding("),
    Fault("vocabulary_embedding", "first = tp.get_local_rank() * len(table)",
          "first = (tp.size() - 1 - tp.get_local_rank()) * len(table)", "loss", "first = mesh",
          "away = "),
    # attention over a sequence that is cut
    Fault("ring_attention", "out = out * shrunk.unsqueeze(-1) + weights @ v",
          "out = out + weights @ v", "loss", "out * shrunk.unsqueeze(-1)"),
    Fault("ring_attention", "total = total * shrunk + weights.sum(-1)",
          "total = total + weights.sum(-1)", "loss", "total * shrunk"),
    Fault("ring_attention", "mask = not_later(rank, (rank - i) % n, q.shape[-2])",
          "mask = not_later(rank, (rank + i) % n, q.shape[-2])", "loss", "(r - i) % n",
          "queries, keys"),
    Fault("ring_attention", "scale = cp.size(), cp.get_local_rank(), q.shape[-1] ** -0.5",
          "scale = cp.size(), cp.get_local_rank(), DIM**-0.5", "loss", "by sqrt(2)", "* scale)"),
    Fault("ring_attention", "k, v = around(k, cp), around(v, cp)", "k = around(k, cp)", "loss",
          "passing v on", "weights @ v"),
    Fault("ring_attention", 'fcoll.all_reduce(p.grad, "sum", cp)',
          'fcoll.all_reduce(p.grad, "avg", cp)', "gradient of o.weight", "4 times too small",
          "self.o("),
    Fault("ring_function",
          "out = torch.exp(lse - both) * out + torch.exp(block_lse - both) * block",
          "out = out + torch.exp(block_lse - both) * block", "loss", "out * torch.exp(lse - both)"),
    Fault("ring_function", "dk, dv = (around(x, cp) for x in (dk, dv))", "pass",
          "gradient of v.weight"),
    Fault("ring_function", "(grad @ v.transpose(-1, -2) - along)", "(grad @ v.transpose(-1, -2))",
          "gradient of k.weight", "along is not subtracted"),
    Fault("rotary_halves", "rotate(q, first), rotate(k, first)", "rotate(q, 0), rotate(k, 0)",
          "loss", "first = mesh", "[first : first"),
    Fault("rotary_complex", "rotate(q, first), rotate(k, first)", "rotate(q, first), rotate(k, 0)",
          "loss", "first = mesh", "[first : first"),
    Fault("rotary_halves", "mask = first + torch.arange", "mask = torch.arange", "loss",
          'adding mesh["cp"]'),
    # sequence parallel
    Fault("sequence_by_hand", 'p.grad = fcoll.all_reduce(p.grad, "sum", tp)', "pass",
          "gradient of norm.bias", MISSING.format("tp"), "self.norm(x)"),
    Fault("sequence_by_hand",
          'fcoll.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.tp, dim=1)',
          "cut(grad, ctx.tp, 1)", "gradient of norm.bias", "before chunk",
          "x.chunk(mesh.size(), dim)"),
    Fault("sequence_by_hand", 'fcoll.reduce_scatter_tensor(x, "sum", tp, dim=1)',
          'fcoll.reduce_scatter_tensor(x, "avg", tp, dim=1)', "loss", SMALL),
    Fault("multihead_tp", 'y = fcoll.all_reduce(y @ out.t(), "sum", tp, grad="identity") + bias',
          'y = fcoll.all_reduce(y @ out.t() + bias, "sum", tp, grad="identity")', "loss",
          "adding bias once"),
    # experts, stages, norms, masks
    Fault("experts", 'fcoll.all_reduce(model.router.grad, "sum", ep)',
          'fcoll.all_reduce(model.router.grad, "sum", ep); model.up.grad.mul_(ep.size())',
          "gradient of up", LARGE, "self.up[e]"),
    Fault("experts", 'fcoll.all_reduce(model.router.grad, "sum", ep)', "model.router.grad",
          "gradient of router", MISSING.format("ep"), "self.router"),
    Fault("experts", "weights.flatten()[order]", "weights.flatten()", "loss", "by [order]",
          "back * weights"),
    Fault("experts", "@ self.down[e]", "@ self.down[0]", "loss", "the number of the execution"),
    Fault("pipeline_gpipe", "loss_fn=", "scale_grads=False, loss_fn=", "gradient of layers.3.bias",
          "4 times what it should be", "layer(x)"),
    Fault("pipeline_1f1b", "torch.stack(losses).mean()", "torch.stack(losses).sum()", "loss",
          "dividing the result of sum by 4"),
    Fault("pictures", "if dp.size() > 1:", "if False:", "loss", "SyncBatchNorm",
          "self.norm(self.first"),
    Fault("batch_norm_by_hand", "(x[:, 0].numel() * dp.size())", "x[:, 0].numel()", "loss",
          "the result of div by 1/2"),
    Fault("dropout_mask", "* mask / keep", "* mask", "loss", "by 16/9"),
]  # fmt: skip
