"""Mistakes of users of the compiler, one class each, as in ``fcoll.errors``."""

from __future__ import annotations

from fcoll.errors import FcollError


class UnknownRow(FcollError):
    template = "{row} is no row of the table{at}. Use one of {known}, or fcoll.register it first."


class NoSuchArgument(FcollError):
    template = "{op} has no argument {missing}{at}. It has {known}."


class UnknownForm(FcollError):
    template = "inductor_ext.config.form = {form!r}{at}: there is no such form. Use one of {known}."


class UnknownSetting(FcollError, AttributeError):
    template = "inductor_ext.config has no setting {name!r}{at}. It has {known}."


class SchedulerFailed(FcollError):
    """A function that was given as ``inductor_ext.config.schedule`` raised."""

    template = (
        "the scheduler {scheduler!r} failed{at}: {error} ({where}). It takes the steps and "
        "gives their names, each once, in another order."
    )


class NotReducible(FcollError):
    """What the Triton kernels on symmetric memory cannot reduce."""

    template = "{why}{at}. {hint}"
