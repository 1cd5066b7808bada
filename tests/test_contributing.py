"""The checklists of CONTRIBUTING.md hold: what they name exists, and no more files are needed."""

from __future__ import annotations

import re
from collections import Counter
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


def naming(*names: str) -> set[str]:
    """The files of fcoll and inductor_ext whose code has one of these words in it."""
    word = re.compile("|".join(rf"(?<![A-Za-z]){name}(?![A-Za-z])" for name in names))
    return {
        str(path.relative_to(ROOT))
        for folder in ("fcoll", "inductor_ext")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h") and word.search(code_of(path))
    }


def code_of(path: Path) -> str:
    """A file without comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".py":
        text = re.sub(r'"""[\s\S]*?"""', "", text)
        return re.sub(r"#.*", "", text)
    return re.sub(r"//.*", "", text)


def test_a_slow_path_collective_stands_in_its_family_and_the_functions():
    """shard_dim_alltoall has no C++."""
    assert naming("shard_dim_alltoall") == {"fcoll/table/exchange.py", "fcoll/functions.py"}
    assert not COLLECTIVES["shard_dim_alltoall"].native.kernel


def test_few_files_name_a_collective():
    """By its own name or by one of torch's c10d names."""
    found = naming("all_gather_into_tensor", "_?allgather_base_?", "allgather_into_tensor\\w*")
    assert len(found) <= 26, "\n".join(sorted(found))


CORE = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
CORE += ("all_to_all_single", "broadcast")


def test_few_files_name_most_core_collectives():
    """All others read the table. A derived name, as all_reduce_, is another word."""
    named = Counter(path for name in CORE for path in naming(rf"(?<!_){name}(?!_)"))
    lists = sorted(path for path, times in named.items() if times >= 4)
    assert len(lists) <= 12, "\n".join(lists)
