"""What a template asks for: its parameters, read from the file as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from deployment.errors import DeploymentError
from deployment.plan import LARGEST_TEMPLATE, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a template. A `default` of None: it must be given."""

    name: str
    type: str
    default: str | None
    description: str
    is_secret: bool


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it comes without types
    """Takes the short forms of intrinsic functions, such as `!Ref`, for what stands behind them."""


def _short_form(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    """`!Ref X` as `{"Ref": "X"}`, `!GetAtt A.B` as `{"Fn::GetAtt": ["A", "B"]}`."""
    content: Any
    if isinstance(node, yaml.ScalarNode):
        content = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        content = loader.construct_sequence(node, deep=True)
    elif isinstance(node, yaml.MappingNode):
        content = loader.construct_mapping(node, deep=True)
    else:
        raise DeploymentError(f"the template has !{suffix} of nothing")
    if suffix == "GetAtt" and isinstance(content, str):
        content = content.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": content}


_Loader.add_multi_constructor("!", _short_form)


def read(stack: Stack) -> dict[str, Any]:
    """The template as data, short forms spelt out.

    Raises:
        DeploymentError: it is missing, no YAML, or larger than CloudFormation takes.
    """
    try:
        text = stack.template
        data = yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader with tags)
    except (OSError, yaml.YAMLError) as error:
        raise DeploymentError(f"the template {stack.path} cannot be read: {error}") from error
    if len(text.encode()) > LARGEST_TEMPLATE:
        raise DeploymentError(f"{stack.path} has over {LARGEST_TEMPLATE:,} bytes, more than a request may have")
    return dict(data)


def parameters(stack: Stack) -> dict[str, Parameter]:
    """The parameters of a template by their names.

    Raises:
        DeploymentError: it cannot be read.
    """
    return {
        name: Parameter(
            name=name,
            type=str(told["Type"]),
            default=None if "Default" not in told else str(told["Default"]),
            description=str(told.get("Description", "")),
            is_secret=str(told.get("NoEcho", "false")).lower() == "true",
        )
        for name, told in read(stack).get("Parameters", {}).items()
    }
