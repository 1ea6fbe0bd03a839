"""What the conditions and rules of a template make of the values of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from deployment.errors import DeploymentError

_NOTHING: Final = object()


def wanted_resources(template: Mapping[str, Any], values: Mapping[str, str], region: str) -> dict[str, str]:
    """Logical ids and types of the resources whose condition holds.

    Args:
        template: as data, short forms spelt out.
        values: of its parameters.
        region: for `AWS::Region`.

    Raises:
        DeploymentError: a condition uses a function that is not known here.
    """
    conditions = template.get("Conditions", {})
    known = {**values, "AWS::Region": region}
    return {
        name: str(told["Type"])
        for name, told in template["Resources"].items()
        if "Condition" not in told or holds(conditions[told["Condition"]], conditions, known)
    }


def holds(condition: Any, conditions: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    """Whether a condition holds.

    Raises:
        DeploymentError: it uses a function that is not known here.
    """
    if isinstance(condition, Mapping) and len(condition) == 1:
        [(name, content)] = condition.items()
        if name == "Condition":
            return holds(conditions[content], conditions, values)
        if name == "Fn::Not":
            return not holds(content[0], conditions, values)
        if name == "Fn::And":
            return all(holds(one, conditions, values) for one in content)
        if name == "Fn::Or":
            return any(holds(one, conditions, values) for one in content)
        if name == "Fn::Equals":
            first, second = (text_of(one, values) for one in content)
            return first == second
        if name == "Fn::Contains":
            strings, member = content
            return text_of(member, values) in [text_of(one, values) for one in strings]
    raise DeploymentError(f"the condition {condition!r} cannot be judged: teach scripts/deployment/conditions.py to")


def refusals(template: Mapping[str, Any], values: Mapping[str, str], region: str) -> list[str]:
    """What the rules of a template say against these values, each with the values that it is about.

    Raises:
        DeploymentError: a rule uses a function that is not known here.
    """
    known = {**values, "AWS::Region": region}
    return [
        f"{assertion['AssertDescription']} ({', '.join(f'{name}={known[name]}' for name in _names(assertion))})"
        for rule in template.get("Rules", {}).values()
        if "RuleCondition" not in rule or holds(rule["RuleCondition"], {}, known)
        for assertion in rule["Assertions"]
        if not holds(assertion["Assert"], {}, known)
    ]


def _names(content: Any) -> dict[str, None]:
    """The parameters that a part of a template refers to, in order."""

    def refs(part: Any) -> Iterator[str]:
        if isinstance(part, Mapping):
            if "Ref" in part:
                yield part["Ref"]
            part = list(part.values())
        if isinstance(part, list):
            for one in part:
                yield from refs(one)

    return dict.fromkeys(refs(content))


def text_of(content: Any, values: Mapping[str, str]) -> str:
    """A value of a template, such as a name: a text, a parameter, or a join of them.

    Raises:
        DeploymentError: it uses a function that is not known here.
    """
    if isinstance(content, (str, int, float, bool)):
        return str(content)
    if isinstance(content, Mapping) and len(content) == 1:
        [(name, inner)] = content.items()
        if name == "Ref" and inner in values:
            return values[inner]
        if name == "Fn::Join":
            separator, parts = inner
            return str(separator.join(text_of(part, values) for part in parts))
    raise DeploymentError(f"the value {content!r} cannot be judged: teach scripts/deployment/conditions.py to")


def filled(content: Any, conditions: Mapping[str, Any], values: Mapping[str, str]) -> Any:
    """A part of a template with parameters and conditions filled in; other functions stay as they are.

    Raises:
        DeploymentError: a condition uses a function that is not known here.
    """
    match content:
        case {"Fn::If": [condition, yes, no]}:
            return filled(yes if holds(conditions[condition], conditions, values) else no, conditions, values)
        case {"Ref": "AWS::NoValue"}:
            return _NOTHING
        case {"Ref": name} if name in values:
            return values[name]
        case Mapping():
            members = ((key, filled(one, conditions, values)) for key, one in content.items())
            return {key: one for key, one in members if one is not _NOTHING}
        case list():
            return [one for part in content if (one := filled(part, conditions, values)) is not _NOTHING]
        case _:
            return content
