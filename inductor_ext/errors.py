"""Mistakes of users of the compiler, one class each, as in ``fcoll.errors``."""

from __future__ import annotations

from fcoll.errors import FcollError


class UnknownRow(FcollError):
    what = "{row} is no row of the table"
    fix = "Use one of {known}, or fcoll.register it first."


class NoSuchArgument(FcollError):
    what = "{op} has no argument {missing}"
    fix = "It has {known}."


class UnknownForm(FcollError):
    what = "inductor_ext.config.form = {form!r}{at}: there is no such form"
    fix = "Use one of {known}."


class UnknownSetting(FcollError, AttributeError):
    what = "inductor_ext.config has no setting {name!r}"
    fix = "It has {known}."


class SchedulerFailed(FcollError):
    """A function that was given as ``inductor_ext.config.schedule`` raised."""

    what = "the scheduler {scheduler!r} failed{at}: {error} ({where})"
    fix = "It takes the steps and gives their names, each once, in another order."


class NotReducible(FcollError):
    """What the Triton kernels on symmetric memory cannot reduce."""
