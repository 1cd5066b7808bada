"""Mistakes of users of the compiler: the class, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import inductor_ext
from fcoll.errors import FcollError
from inductor_ext import errors
from inductor_ext.config import Config, config
from inductor_ext.lower import registry


def test_a_form_that_does_not_exist():
    before = config.form
    with pytest.raises(errors.UnknownForm, match=r"'nosuch'.*Use one of fused, opaque, kernel"):
        inductor_ext.config.form = "nosuch"
    with pytest.raises(errors.UnknownForm), config.patch(merge_bytes=1, form="nosuch"):
        pass
    with pytest.raises(errors.UnknownForm):
        Config(form="nosuch")
    assert config.form == before and config.merge_bytes != 1


def test_a_setting_that_does_not_exist():
    with pytest.raises(errors.UnknownSetting, match=r"no setting 'from'.*It has form, "):
        setattr(inductor_ext.config, "from", "opaque")
    with pytest.raises(errors.UnknownSetting), config.patch(froms="opaque"):
        pass


def test_a_form_of_the_environment_that_does_not_exist():
    done = subprocess.run(
        [sys.executable, "-c", "import inductor_ext"],
        env=os.environ | {"INDUCTOR_EXT_FORM": "nosuch"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "UnknownForm: " in done.stderr, done.stderr


def test_a_row_that_does_not_exist():
    with pytest.raises(
        errors.UnknownRow, match=r"nosuch is no row of the table, at .*test_inductor"
    ):
        registry.lowers("nosuch")
    with pytest.raises(errors.UnknownRow):
        registry.lowering_of("nosuch")


def test_an_argument_that_does_not_exist():
    op = torch.ops.aten.add.Tensor
    message = r"aten.add.Tensor has no argument x or group_name.*It has self, other, alpha\."
    with pytest.raises(errors.NoSuchArgument, match=message):
        inductor_ext.requires_symmetric_memory(op, "x")


def test_every_mistake_is_an_error_of_fcolls():
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert len(classes) > 4
    assert all(issubclass(c, FcollError) and c.template for c in classes)
