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

# written as programs of libraries are, before it was known what would be said of them
FAULTS += [
    Fault(
        "mlp",
        "y = _ReduceFromTP.apply(y, self.group)\n        return y + self.bias",
        "y = _ReduceFromTP.apply(y + self.bias, self.group)\n        return y",
        "loss",
    ),
    Fault(
        "gqa", "first = r * n_kv // n", "first = r % n_kv", "loss", also=("self.wk =", "self.wv =")
    ),
    Fault(
        "falcon",
        "head = self.tp.get_local_rank() * self.n_local + torch.arange(self.n_local)",
        "head = torch.arange(self.n_local)",
        "loss",
        'adding mesh["tp"]',
        also=("slopes = ",),
    ),
    Fault(
        "falcon",
        'if name.startswith(("q_norm", "k_norm")):',
        "if False:",
        "gradient of k_norm.weight",
        'an all-reduce over "tp" is missing',
        also=("self.q_norm(q)", "self.k_norm(k)", "self.q_norm, self.k_norm ="),
    ),
    Fault(
        "falcon",
        "self.gate_up = shard(w.view(2, HIDDEN, DIM), tp, 1)",
        "self.gate_up = shard(w, tp)",
        "loss",
        also=("gate, up =",),
    ),
    Fault(
        "lora",
        "z = _CopyToTP.apply(x @ self.lora_a.t(), self.group)",
        "z = x @ self.lora_a.t()",
        "gradient of lora_a",
        'an all-reduce over "tp" is missing',
    ),
    Fault(
        "sequence_embedding",
        "x = _ScatterSequence.apply(x, self.tp)",
        "x = x.chunk(self.tp.size(), 1)[self.tp.get_local_rank()]",
        "gradient of table",
        also=("F.embedding(local", "x = _ReduceFromTP", "x = x.masked_fill"),
    ),
    Fault(
        "padded_head",
        "pad = torch.arange(len(self.head)) + start >= REAL",
        "pad = torch.arange(len(self.head)) >= REAL",
        "loss",
        'adding mesh["tp"]',
        also=("masked_fill(pad",),
    ),
    Fault(
        "gathered",
        "tril(diagonal=offset)",
        "tril()",
        "loss",
        also=(".tril()", "F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"),
    ),
    Fault(
        "zigzagged",
        "back = (2 * n - 1 - r) * half + torch.arange(half)",
        "back = (n + r) * half + torch.arange(half)",
        "loss",
        also=("torch.cat([front, back])",),
    ),
    Fault(
        "next_tokens",
        (
            "after = torch.cat([everything[:, 1:], torch.full((len(tokens), 1), -10"
            "0)], 1)\n        labels = after[:, r * s : (r + 1) * s]"
        ),
        (
            "after = 0\n        labels = torch.cat([tokens[:, 1:], torch.full((len(t"
            "okens), 1), -100)], 1)"
        ),
        "loss",
        also=("labels = after[",),
    ),
    Fault(
        "next_tokens",
        "self.wpe.weight[start : start + s]",
        "self.wpe.weight[:s]",
        "loss",
        "begins at r * 4",
    ),
    Fault(
        "convolution",
        "if r == 0:\n            halo = halo * 0",
        "halo = halo * 0",
        "loss",
        also=("torch.cat([halo, x], -1)",),
    ),
    Fault(
        "masked_loss",
        "mask = mask[:, r * s : (r + 1) * s]",
        "mask = mask[:, :s]",
        "loss",
        "begins at r * 4",
        also=("(error * mask)",),
    ),
    Fault(
        "two_axes",
        'fcoll.all_reduce(fcoll.all_reduce(p.grad, "avg", dp), "avg", cp)',
        'fcoll.all_reduce(p.grad, "avg", dp)',
        "gradient of qkv.weight",
        'an average over "cp" is missing',
        also=("self.qkv(x)", "self.out(", 'p.grad = fcoll.all_reduce(p.grad, "avg", dp)'),
    ),
    Fault(
        "token_mean",
        ('loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count'),
        "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / dp.size()",
        "loss",
    ),
    Fault(
        "fsdp_divide",
        "model.set_gradient_divide_factor(1.0)",
        "pass",
        "gradient of up.weight",
        "2 times too small",
        also=("self.up(x)", "self.down(", "model(x).square()", "loss.backward()"),
    ),
    Fault(
        "momentum",
        (
            "dist.all_reduce(p.grad, group=self.dp.get_group())\n            p.grad "
            "/= self.dp.size()\n            m.mul_(self.beta).add_(p.grad)\n         "
            "   p.sub_(m, alpha=self.lr)"
        ),
        (
            "m.mul_(self.beta).add_(p.grad)\n            dist.all_reduce(p.grad, gro"
            "up=self.dp.get_group())\n            p.grad /= self.dp.size()\n         "
            "   p.sub_(p.grad + self.beta * m, alpha=self.lr)"
        ),
        "updated parameter of up.weight",
    ),
    Fault(
        "clip_tp",
        "dist.all_reduce(sharded, group=tp.get_group())",
        "pass",
        "result[1]",
        'an all-reduce over "tp" is missing',
        also=("sharded = sum(", "norm = (sharded"),
    ),
    Fault(
        "clip_tp",
        'return name in ("fc1.weight", "fc1.bias", "fc2.weight")',
        "return True",
        "result[1]",
        "behind the reduction over tp",
        also=("sharded = sum(", "all_reduce(sharded"),
    ),
    Fault(
        "learning_rate",
        "lr = 0.05",
        "lr = 0.05 * dp.size()",
        "updated parameter of up.weight",
        also=("torch.optim.SGD", "optimizer.step()"),
    ),
    Fault(
        "batch_norm",
        "var = AllSum.apply((x - mean).square().mean(0), group) / n",
        "var = AllSum.apply((x - x.mean(0)).square().mean(0), group) / n",
        "loss",
    ),
    Fault(
        "microbatches",
        'loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / items',
        (
            'loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / (y != -'
            "100).sum() / parts / dp.size()"
        ),
        "loss",
    ),
    Fault(
        "contrastive",
        "labels = torch.arange(len(a)) + dp.get_local_rank() * len(a)",
        "labels = torch.arange(len(a))",
        "loss",
        'adding mesh["dp"]',
    ),
    Fault(
        "contrastive",
        "all_image = torch.cat(dnn.all_gather(image, group=dp.get_group()))",
        (
            "parts = [torch.empty_like(image) for _ in range(dp.size())]; dist.all_"
            "gather(parts, image, group=dp.get_group()); all_image = torch.cat(part"
            "s)"
        ),
        "gradient of image.weight",
        also=("self.image(a)",),
    ),
    Fault(
        "muon",
        "update = orthogonal(torch.cat(parts)).chunk(tp.size())[tp.get_local_rank()]",
        "update = orthogonal(weight.grad)",
        "updated parameter of weight",
        also=("x = g /", "g.square()"),
    ),
    Fault(
        "zero1",
        "shard = shard - 0.1 * (mine + 0.01 * shard)",
        "shard = shard - 0.1 * (mine + 0.01 * n * shard)",
        "updated parameter of up.weight",
    ),
    Fault(
        "half_dtensor",
        "x = x.to_local(grad_placements=[Partial()])",
        "x = x.to_local()",
        "gradient of scale",
        'an all-reduce over "tp" is missing',
        also=("x = DTensor.from_local(x * self.scale", "x * self.scale"),
    ),
    Fault(
        "half_dtensor",
        "y = DTensor.from_local(y, self.tp, [Partial()])",
        "y = DTensor.from_local(y, self.tp, [Replicate()])",
        "loss",
        also=("y = h @", "return y.redistribute"),
    ),
    Fault(
        "moe",
        "share = share / n",
        "share = share",
        "loss",
        also=("dist.all_reduce(share", "EXPERTS * (share * mean)", "share = F.one_hot"),
    ),
    Fault(
        "moe",
        "dist.all_reduce(p.grad, group=group)\n            p.grad.div_(n)",
        "dist.all_reduce(p.grad, group=group)\n                p.grad.div_(n)",
        "gradient of w1",
        "2 times too large",
        also=("self.w1[e]", "self.w2[e]"),
    ),
    Fault(
        "moe",
        "weight = weight / weight.sum(-1, keepdim=True)",
        "weight = weight / weight.sum(-1, keepdim=True) / n",
        "loss",
    ),
    Fault(
        "local_experts",
        "weight = weight.softmax(-1)",
        (
            "weight = torch.where((chosen >= self.first) & (chosen < self.first + s"
            "elf.n_local), weight, -1e4).softmax(-1)"
        ),
        "loss",
    ),
    Fault("local_experts", "0.01 * z / n", "0.01 * z", "loss"),
    Fault(
        "tied_stages",
        "dist.all_reduce(embedding.grad, group=group)",
        "pass",
        "gradient of embedding",
        'an all-reduce over "pp" is missing',
        also=("F.embedding(t, embedding)", "h @ embedding.t()", "embedding = nn.Parameter"),
    ),
    Fault(
        "wide_norm",
        (
            "square = dnn.all_reduce(q.square().sum(-1, keepdim=True), group=self.t"
            "p.get_group())\n        q = q * torch.rsqrt(square / DIM + 1e-6)"
        ),
        (
            "square = q.square().sum(-1, keepdim=True)\n        q = q * torch.rsqrt("
            "square / q.shape[-1] + 1e-6)"
        ),
        "loss",
    ),
]
