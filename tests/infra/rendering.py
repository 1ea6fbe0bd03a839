"""Templates as CloudFormation would fill them in: what is asserted is what AWS gets, not how the template says it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cfnlint.decode import cfn_yaml

ROOT: Final = Path(__file__).resolve().parents[2]
INFRA: Final = ROOT / "infra"
ACCOUNT: Final = "123456789012"

_NOTHING: Final = object()
_VARIABLE: Final = re.compile(r"\$\{([^!}]+)\}")


@dataclass(slots=True)
class Rendered:
    """A template with its parameters filled in. What only AWS knows stands as `<Resource>` or `<Resource.Name>`."""

    name: str
    given: Mapping[str, str]
    region: str = "eu-central-1"
    template: Mapping[str, Any] = field(init=False)
    parameters: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.template = self.template_of(self.name)
        declared = self.template["Parameters"]
        assert set(self.given) <= set(declared), set(self.given) - set(declared)
        self.parameters = {name: self.given.get(name, one.get("Default")) for name, one in declared.items()}
        missing = [name for name, value in self.parameters.items() if value is None]
        assert not missing, f"parameters without a value: {missing}"
        for name, one in declared.items():
            value = str(self.parameters[name])
            assert value in [str(allowed) for allowed in one.get("AllowedValues", [value])], (name, value)
            assert re.fullmatch(one.get("AllowedPattern", ".*"), value, re.DOTALL), (name, value)

    @staticmethod
    def template_of(name: str) -> Mapping[str, Any]:
        """The template as it is, short forms of functions spelt out."""
        template: Mapping[str, Any] = cfn_yaml.load(str(INFRA / f"{name}.yaml"))
        return template

    @property
    def resources(self) -> dict[str, dict[str, Any]]:
        """The resources whose condition holds."""
        return {
            name: {key: self.fill(value) for key, value in one.items()}
            for name, one in self.template["Resources"].items()
            if self.holds(one.get("Condition"))
        }

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs whose condition holds."""
        outputs = self.template["Outputs"].items()
        return {name: self.fill(one["Value"]) for name, one in outputs if self.holds(one.get("Condition"))}

    @property
    def refused(self) -> list[str]:
        """What the rules say against the parameters."""
        return [
            assertion["AssertDescription"]
            for rule in self.template.get("Rules", {}).values()
            if "RuleCondition" not in rule or self.fill(rule["RuleCondition"])
            for assertion in rule["Assertions"]
            if not self.fill(assertion["Assert"])
        ]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """The properties of all resources of a type."""
        return [one["Properties"] for one in self.resources.values() if one["Type"] == kind]

    def properties(self, name: str) -> dict[str, Any]:
        """The properties of a resource."""
        properties: dict[str, Any] = self.resources[name]["Properties"]
        return properties

    def holds(self, condition: str | None) -> bool:
        """Whether a condition holds; there is always none."""
        return condition is None or bool(self.fill(self.template["Conditions"][condition]))

    def fill(self, value: Any) -> Any:
        """A value without functions."""
        if isinstance(value, Mapping) and len(value) == 1:
            [(name, argument)] = value.items()
            if name in ("Ref", "Condition") or name.startswith("Fn::"):
                return self._call(name, argument)
        if isinstance(value, Mapping):
            filled = {str(key): self.fill(one) for key, one in value.items()}
            return {key: one for key, one in filled.items() if one is not _NOTHING}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [one for one in map(self.fill, value) if one is not _NOTHING]
        return str(value) if isinstance(value, str) else value

    def _call(self, name: str, argument: Any) -> Any:
        match name:
            case "Ref":
                return self._ref(str(argument))
            case "Condition":
                return self.holds(str(argument)) if argument in self.template.get("Conditions", {}) else argument
            case "Fn::GetAtt":
                return f"<{'.'.join(argument)}>"
            case "Fn::Sub" if isinstance(argument, Sequence) and not isinstance(argument, str):
                text, more = argument
                filled = {key: self.fill(value) for key, value in more.items()}
                return self._sub(text, filled)
            case "Fn::Sub":
                return self._sub(str(argument), {})
            case "Fn::Base64":
                return self.fill(argument)
            case "Fn::If":
                return self.fill(argument[1 if self.holds(str(argument[0])) else 2])
            case "Fn::Equals":
                left, right = map(self.fill, argument)
                return left == right
            case "Fn::Contains":
                strings, member = map(self.fill, argument)
                return member in strings
            case "Fn::Not":
                return not self.fill(argument[0])
            case "Fn::And":
                return all(self.fill(one) for one in argument)
            case "Fn::Or":
                return any(self.fill(one) for one in argument)
            case "Fn::Join":
                return str(argument[0]).join(map(str, self.fill(argument[1])))
            case "Fn::Split":
                return str(self.fill(argument[1])).split(str(argument[0]))
            case "Fn::Select":
                return self.fill(argument[1])[int(argument[0])]
        raise AssertionError(f"{name} is not known here")

    def _ref(self, name: str) -> Any:
        pseudo = {
            "AWS::Region": self.region,
            "AWS::AccountId": ACCOUNT,
            "AWS::Partition": "aws",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::StackName": f"ThunderAgent-{self.name}",
            "AWS::NoValue": _NOTHING,
        }
        return pseudo[name] if name in pseudo else self.parameters.get(name, f"<{name}>")

    def _sub(self, text: str, more: Mapping[str, Any]) -> str:
        def replaced(found: re.Match[str]) -> str:
            return str(more[found[1]] if found[1] in more else self._variable(found[1]))

        return _VARIABLE.sub(replaced, text).replace("${!", "${")

    def _variable(self, name: str) -> Any:
        return f"<{name}>" if "." in name else self._ref(name)
