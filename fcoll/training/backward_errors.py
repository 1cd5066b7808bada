"""Messages of errors in a backward pass, with the parameters by name.

The first sentences are those of torch's reducer, which programs and tests look for; what follows
them says which parameters and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from fcoll.training.reducer import Reducer

MARKED_UNUSED = (
    "3) Incorrect unused parameter detection. The parameter was not in the graph of the module's "
    "outputs, and then got a gradient: pass find_unused_parameters=False, or static_graph=True."
)
KEEPS_BUCKETS = (
    "fcoll's reducer keeps its buckets from one backward pass to the next: "
    "lazy_bucket_allocation=True saves no memory with it."
)
SHOWN = 8  # modules or parameters that a sentence lists


def listed(names: Iterable[str]) -> str:
    """The first few of them.

    >>> from fcoll.training.backward_errors import listed
    >>> listed(["a", "b"]), listed(map(str, range(10)))
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    all_ = list(names)
    rest = len(all_) - SHOWN
    return ", ".join(all_[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def modules_of(names: Iterable[str]) -> list[str]:
    """The modules that parameters are in, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] or "the module itself" for name in names))


def late(name: str, line: str) -> str:
    """A gradient that nobody will reduce."""
    return (
        f"The gradient of {name} arrived after the reduction{f' at {line}' if line else ''} had "
        "ended, with no forward pass since: it and what follows is not reduced, so ranks differ. "
        "Add the losses up and call backward() once, or run the passes but the last in no_sync()."
    )


def unfinished(reducer: Reducer, missing: Sequence[int], raised_at: str) -> str:
    """Some parameters had no gradient when the next iteration began; if an exception ended its
    backward pass, ``raised_at`` is the line of that."""
    names = [reducer.names[i] for i in missing]
    without = f"did not receive grad for rank {reducer.group.rank}"
    lacking = f"Parameters which {without}: {', '.join(names)}"
    indices = f"Parameter indices which {without}: {' '.join(map(str, missing))}"
    if raised_at:
        return (
            f"It did not, since an exception ended the backward pass at {raised_at}.\n"
            f"{lacking}\n{indices}\nTo go on after it, call reset_state() of the "
            "reducer (the module's `reducer`) on all ranks."
        )
    if reducer.static_graph:
        text = (
            "This error indicates that your training graph has changed in this iteration, e.g., "
            "one parameter is used in first iteration, but then got unused in the second "
            "iteration. this is not compatible with static_graph set to True."
        )
        return f"{text}\n{indices}\n{lacking}\n{_cause(reducer, names)}"
    text = (
        "This error indicates that your module has parameters that were not used in producing "
        "loss. "
    )
    if reducer.finds_unused:
        text += (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all "
            "`forward` outputs participate in computing loss. You can fix this by making sure all "
            "`forward` function outputs participate in calculating loss. "
        )
    else:
        text += (
            "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by "
            "making sure all `forward` function outputs participate in calculating loss. "
        )
    text += f"\n{lacking}\n{indices}\n{_cause(reducer, names)}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        text += (
            "\nFor what each rank did, set the environment variable TORCH_DISTRIBUTED_DEBUG to "
            "either INFO or DETAIL."
        )
    return text


def _cause(reducer: Reducer, missing: Sequence[str]) -> str:
    modules = listed(modules_of(missing))
    if not reducer.passes:
        why = "no backward pass ran through the module after its last forward pass"
    elif len(missing) == len(reducer.names):
        why = "the backward pass reached none of the parameters: was the output detached?"
    elif reducer.finds_unused:
        why = f"an output that goes through {modules} was returned and not used in the loss"
    else:
        why = (
            f"the forward pass skipped {modules}, or what came out was not used in the loss or "
            "was detached"
        )
    return f"Likely cause: {why}."


def gradients(count: int) -> str:
    """How many gradients a parameter of a static graph got in the first iteration, in words."""
    return f"got {count} gradient{'s' * (count > 1)}" if count else "was unused"


def bucket(index: int, count: int, names: Sequence[str], made_at: str) -> str:
    """One of a reducer's buckets."""
    return (
        f"bucket {index} of {count}, with the gradients of {listed(names)} (the reducer that was "
        f"made at {made_at})"
    )
