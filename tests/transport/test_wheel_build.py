"""`pip install .`: the torch that is there is compiled with, none is downloaded beside it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

VERSION = version("torch")  # as packages are asked for, without what it was built for

BACKEND = Path(__file__).parents[2] / "fcoll" / "transport" / "native" / "wheel" / "wheel_build.py"


@pytest.fixture
def backend(monkeypatch):
    for name in ("FCOLL_TORCH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("wheel_backend", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Builds run in an environment without torch."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    python = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)
    return python


def test_the_torch_of_this_python(backend, monkeypatch, capfd):
    # as in an isolated build of pip's, whose packages hide those of the environment
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    assert not [x for x in backend.get_requires_for_build_wheel() if x.startswith("torch")]
    assert f"torch {VERSION} of {sys.executable}" in capfd.readouterr().err


def test_the_torch_of_the_active_environment(backend, bare, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    found = backend.installed_torch()
    assert found == (str(Path(sys.prefix, "bin", "python")), VERSION)


def test_none_is_there(backend, bare, monkeypatch, capfd):
    monkeypatch.setattr(sys, "base_prefix", "/nowhere")
    assert "torch==2.13.0" in backend.get_requires_for_build_wheel()
    assert "torch 2.13.0 is downloaded" in capfd.readouterr().err


def test_another_version_is_asked_for(backend, monkeypatch):
    monkeypatch.setenv("FCOLL_TORCH", "2.14.9")
    assert "torch==2.14.9" in backend.get_requires_for_build_wheel()
    monkeypatch.setenv("FCOLL_TORCH", VERSION.partition("+")[0])
    assert backend.installed_torch() == (sys.executable, VERSION)


def test_a_python_is_named(backend, bare, monkeypatch):
    python = str(Path(sys.prefix, "bin", "python"))
    monkeypatch.setenv("FCOLL_TORCH", python)
    assert backend.installed_torch() == (python, VERSION)
    monkeypatch.setenv("FCOLL_TORCH", bare)
    with pytest.raises(SystemExit, match="has torch"):
        backend.get_requires_for_build_wheel()


def test_a_python_of_another_version_compiles_nothing(backend, monkeypatch):
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    assert backend.installed_torch() is None
