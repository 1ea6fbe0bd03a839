"""The value of each parameter of a stack, and where it comes from.

A value that was given once stays: a later run without it does not fall back to the default of the template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from deployment.errors import WrongOption
from deployment.plan import STACKS
from deployment.templates import Parameter

HIDDEN: Final = "****"


class Origin(StrEnum):
    """Where a value comes from; the first that has one decides."""

    GIVEN = "given"
    OUTPUT = "of another stack"
    MADE = "made by this run"
    KEPT = "kept"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What a parameter will be. `before` is what the stack has; None if it has none."""

    parameter: Parameter
    value: str
    origin: Origin
    before: str | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the stack has another value now."""
        return self.before is not None and self.before != self.value and not self.keeps_secret

    @property
    def differs_from_default(self) -> bool:
        """Whether the template alone would have given another value."""
        return self.value != self.parameter.default

    @property
    def keeps_secret(self) -> bool:
        """A secret that the stack has and nobody gave: CloudFormation alone knows it."""
        return self.parameter.is_secret and self.origin is Origin.KEPT

    @property
    def argument(self) -> dict[str, str | bool]:
        """As CloudFormation takes it."""
        if self.origin is Origin.KEPT:  # what is told of it may be hidden, or what it stands for
            return {"ParameterKey": self.parameter.name, "UsePreviousValue": True}
        return {"ParameterKey": self.parameter.name, "ParameterValue": self.value}

    def shown(self, value: str | None) -> str:
        """A value of it for people: secrets are not told."""
        if value is None:
            return "-"
        return HIDDEN if self.parameter.is_secret and value else value or "(nothing)"


def given(texts: Iterable[str]) -> dict[str, str]:
    """The values of `--parameter NAME=VALUE` and `--parameter STACK.NAME=VALUE`.

    Raises:
        WrongOption: one has no `=`, or names a stack that does not exist.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise WrongOption(f"--parameter {text!r}: write NAME=VALUE or STACK.NAME=VALUE")
        stack, dot, _ = name.partition(".")
        if dot and stack not in {one.name for one in STACKS}:
            raise WrongOption(f"--parameter {text!r}: there is no stack {stack!r}")
        values[name] = value
    return values


def refuse_unknown(values: Mapping[str, str], known: Mapping[str, Mapping[str, Parameter]]) -> None:
    """A parameter that no chosen stack has is a mistake in typing.

    Args:
        values: what was given.
        known: the parameters of each chosen stack.

    Raises:
        WrongOption: one is unknown; the message has what is close.
    """
    import difflib

    for name in values:
        stack, dot, plain = name.rpartition(".")
        places = {stack: known.get(stack, {})} if dot else known
        if any(plain in parameters for parameters in places.values()):
            continue
        every = sorted({one for parameters in places.values() for one in parameters})
        close = difflib.get_close_matches(plain, every, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(every) or 'none'}"
        raise WrongOption(f"no stack of this run has the parameter {name}{hint}")


def given_to(stack: str, name: str, given: Mapping[str, str]) -> str | None:
    """What the command line says of a parameter of a stack; `STACK.NAME` goes before `NAME`."""
    return given.get(f"{stack}.{name}", given.get(name))


def values_of(
    stack: str,
    parameters: Mapping[str, Parameter],
    *,
    given: Mapping[str, str],
    outputs: Mapping[str, str],
    made: Mapping[str, str],
    before: Mapping[str, str],
) -> tuple[list[Value], list[Parameter]]:
    """The values of a stack's parameters, and the parameters that nobody has a value for.

    Args:
        stack: its name.
        parameters: of the template.
        given: of the command line.
        outputs: of the stacks before it.
        made: what the run found or made, such as the key of the code.
        before: what the stack has now; empty for a new one.

    Raises:
        WrongOption: two numbers cannot go together, which rules of a template cannot compare.
    """
    values: list[Value] = []
    missing: list[Parameter] = []
    for name, parameter in parameters.items():
        for origin, value in (
            (Origin.GIVEN, given_to(stack, name, given)),
            (Origin.OUTPUT, outputs.get(name)),
            (Origin.MADE, made.get(name)),
            (Origin.KEPT, before.get(name)),
            (Origin.DEFAULT, parameter.default),
        ):
            if value is not None:
                values.append(Value(parameter=parameter, value=value, origin=origin, before=before.get(name)))
                break
        else:
            missing.append(parameter)
    _refuse_disorder({one.parameter.name: one for one in values})
    return values, missing


def _refuse_disorder(values: Mapping[str, Value]) -> None:
    for name, one in values.items():
        most = values.get(name.replace("Min", "Max", 1)) if name.startswith("Min") else None
        if most and most.value.isdigit() and one.value.isdigit() and int(one.value) > int(most.value):
            raise WrongOption(
                f"{name}={one.value} is more than {most.parameter.name}={most.value}: make it smaller, or "
                f"{most.parameter.name} larger"
            )
        if name.startswith("Warm") and one.before and one.value.isdigit() and int(one.value) < int(one.before):
            raise WrongOption(f"{name}={one.value} is less than the {one.before} of now: it can be raised only")


def worth_telling(values: Sequence[Value]) -> list[Value]:
    """Those that change, and those that a reader of the template would not expect."""
    return [one for one in values if one.is_changed or (one.before is None and one.differs_from_default) or _kept(one)]


def _kept(value: Value) -> bool:
    return value.origin is Origin.KEPT and value.differs_from_default
