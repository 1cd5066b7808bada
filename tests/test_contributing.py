"""The checklists of CONTRIBUTING.md hold: what they name exists, and no more files are needed."""

from __future__ import annotations

import re
from pathlib import Path

from fcoll.table.collectives import COLLECTIVES

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def checklist() -> list[str]:
    """The files that adding a collective takes, in order."""
    return re.findall(r"^\d\. `([\w/.]+)`", section("Add a collective"), re.M)


def test_every_file_and_folder_that_is_named_exists():
    for name in re.findall(r"`((?:fcoll|inductor_ext|tests|benchmarks|examples)/[\w/.]*)`", TEXT):
        assert (ROOT / name).exists(), name


def test_a_collective_takes_two_files_and_parity_nine():
    assert checklist()[:2] == ["fcoll/table/reduce.py", "fcoll/functions.py"]
    assert len(checklist()) == 9


def mentions(row: str) -> set[str]:
    """The source files with a rule for one collective: its name as a whole word in code, where it
    is not a call of it (of a family's adjoint, of a benchmark's loop) or a torch op's name."""
    word = re.compile(rf'(?<![\w.:"]){row}(?![\w])|"{row}"')
    found = set()
    for folder in ("fcoll", "inductor_ext"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h") and word.search(code_of(path)):
                found.add(str(path.relative_to(ROOT)))
    return found


def code_of(path: Path) -> str:
    """A file without comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".py":
        text = re.sub(r'"""[\s\S]*?"""', "", text)
        return re.sub(r"#.*", "", text)
    return re.sub(r"//.*", "", text)


# Drop-ins that repeat torch's names, demos and measurements, which a new collective need not have.
APART = ("fcoll/dist.py", "fcoll/compat.py", "fcoll/local/", "fcoll/cli/")
APART += ("fcoll/transport/native/backend.cpp", "fcoll/profiling/calibrate.py")
APART += ("fcoll/report/prices.py",)
APART += ("fcoll/simulation/batched/shortcuts.py",)  # for torch's functions; ours pass by the table


def test_a_slow_path_collective_stands_in_two_files():
    """shard_dim_alltoall has no C++: its family file, the public function, nothing else."""
    found = {f for f in mentions("shard_dim_alltoall") if not f.startswith(APART)}
    assert found == {"fcoll/table/exchange.py", "fcoll/functions.py"}
    assert not COLLECTIVES["shard_dim_alltoall"].native.kernel


def test_parity_with_all_gather_takes_no_file_beyond_the_checklist():
    found = {f for f in mentions("all_gather_into_tensor") if not f.startswith(APART)}
    listed = set(checklist()) | {"fcoll/table/gather.py"}
    # other collectives' gradients and forms that are made of it, and torch's c10d ops
    users = {"fcoll/table/reduce.py", "fcoll/table/shares.py", "fcoll/table/writing.py"}
    assert found <= listed | users | {"fcoll/tracing/c10d.py"}, found - listed
