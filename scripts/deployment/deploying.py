"""Makes and updates stacks, one after the other: what would change is shown, agreed to, done, and looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.markup import escape

from deployment.changes import ChangeSet, drop, make_change_set, show
from deployment.cloud import Cloud
from deployment.code import PLACES, Code
from deployment.conditions import refusals, wanted_resources
from deployment.errors import DeploymentError, WrongOption, told
from deployment.local import default_subnets, made_locally
from deployment.plan import Stack
from deployment.progress import Follower, why
from deployment.states import State, check_physical_ids, state_of
from deployment.takeover import (
    existing_tables,
    import_template,
    prepare,
    refuse_impossible,
    resources_to_import,
    steps_of,
)
from deployment.templates import Parameter, parameters, read
from deployment.values import Value, refuse_unknown, values_of

GOOD = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE")


class Declined(DeploymentError):
    """The person did not want it."""


@dataclass(slots=True, kw_only=True)
class Deployment:
    """One run.

    Args:
        cloud: where.
        console: what it says.
        prefix: of the stacks' names.
        agree: asks whether to go on, with what.
        code: what they run.
        revert_drift: whether what differs from the templates by hand is put back.
    """

    cloud: Cloud
    console: Console
    prefix: str
    agree: Callable[[str], bool]
    code: Code
    revert_drift: bool = False
    outputs: dict[str, str] = field(default_factory=dict)
    _made: dict[str, str] = field(default_factory=dict)

    def stack_name(self, stack: Stack) -> str:
        """The name of a stack in CloudFormation."""
        return f"{self.prefix}-{stack.name}"

    def run(self, stacks: Sequence[Stack], given: Mapping[str, str], *, every: Sequence[Stack]) -> int:
        """Deploy these stacks in this order; how many were changed.

        Args:
            stacks: what is to be deployed.
            given: parameters of the command line.
            every: all stacks in their order; the outputs of those that are there already are used too.

        Raises:
            DeploymentError: one of them could not be deployed; those before it stay.
        """
        self.console.print(f"Deploying to {escape(self.cloud.place)}", highlight=False)
        known = {stack.name: parameters(stack) for stack in stacks}
        refuse_unknown(given, known)
        self.code.refuse_unused(known)
        for stack in stacks:
            before = _parameters(state_of(self.cloud, self.stack_name(stack)))
            self.code.check(stack.name, known[stack.name], given, before)
        changed = 0
        for stack in every:
            state = state_of(self.cloud, self.stack_name(stack))
            if stack in stacks:
                changed += self._deploy(stack, known[stack.name], state, given)
            elif state is not None:
                self.outputs |= state.outputs
        return changed

    def _deploy(
        self, stack: Stack, parameters: Mapping[str, Parameter], state: State | None, given: Mapping[str, str]
    ) -> bool:
        name = self.stack_name(stack)
        self.console.print(f"\n[bold]{name}[/]: {stack.purpose}", highlight=False)
        if state is not None and state.is_busy:
            self.console.print(f"  somebody is at work on it ({state.status}); waiting")
            follower = Follower(self.cloud, self.console, state.id, has_begun=True)
            follower.until_done()
            state = state_of(self.cloud, name)
        if state is not None and state.is_stuck:
            raise DeploymentError(
                f"the stack {name} is {state.status}: {state.reason or 'no reason is told'}. Mend it, then run aws "
                f"cloudformation continue-update-rollback --stack-name {name}, or scripts/destroy"
            )
        values, missing = self._values(stack, parameters, given, _parameters(state))
        if missing:
            names = " ".join(f"--parameter {one.name}=…" for one in missing)
            self.console.print(f"  [yellow]left out[/]: it needs {escape(names)}", highlight=False)
            for one in missing:
                self.console.print(f"    {one.name}: {escape(one.description)}", highlight=False)
            return False
        if wrong := refusals(read(stack), {one.parameter.name: one.value for one in values}, self.cloud.region):
            raise WrongOption(f"{name}: {' '.join(wrong)}")
        if state is not None and state.is_ruin:
            self._clear(name, state)
            state = None
        if state is None or state.is_new:
            state = self._take_over(stack, values, state)
        else:
            refuse_impossible(read(stack), state.parameters, values, self.cloud.region)
        change_set = make_change_set(
            self.cloud, name, values, template=stack.template, state=state, revert_drift=self.revert_drift
        )
        if change_set is None:
            self.console.print("  nothing to change")
        else:
            self._change(stack, change_set, values, is_new=state is None or state.is_new)
        self._check(stack, values)
        return change_set is not None

    def _take_over(self, stack: Stack, values: Sequence[Value], state: State | None) -> State | None:
        """Make a stack of the tables that are there already; the state of the stack after it."""
        name, template = self.stack_name(stack), read(stack)
        tables = existing_tables(self.cloud, template, values)
        if not tables:
            return state
        names = ", ".join(one.name for one in tables)
        self.console.print(f"  takes over what is there already: {escape(names)}", highlight=False)
        steps = steps_of(self.cloud, tables)
        for step in steps:
            self.console.print(f"  before that, {step.table.name}: {step.words}", highlight=False)
        if steps and not self.agree(f"Change {names}?"):
            raise Declined(f"{names} was left as it is")
        prepare(self.cloud, tables, steps)
        change_set = make_change_set(
            self.cloud,
            name,
            values,
            template=import_template(template, tables),
            state=state,
            imported=resources_to_import(tables),
        )
        if change_set is not None:
            self._change(stack, change_set, (), is_new=True)
        return state_of(self.cloud, name)

    def _change(self, stack: Stack, change_set: ChangeSet, values: Sequence[Value], *, is_new: bool) -> None:
        name = self.stack_name(stack)
        if self.cloud.endpoint and values:  # a local engine lists what conditions leave out as well
            wanted = self._wanted(stack, values)
            meant = tuple(one for one in change_set.changes if one.action != "Add" or one.resource in wanted)
            change_set = replace(change_set, changes=meant)
        show(self.console, change_set, values)
        agrees = False
        try:
            agrees = self.agree(f"Change {name}?")
        finally:
            if not agrees:
                drop(self.cloud, name, change_set.id, is_new=is_new)
        if not agrees:
            raise Declined(f"{name} was left as it is")
        follower = Follower(self.cloud, self.console, name)
        with told(f"changing {name}"):
            self.cloud.client("cloudformation").execute_change_set(ChangeSetName=change_set.id)
        status = follower.until_done()
        if status not in GOOD:
            raise why(follower, name, status)

    def _wanted(self, stack: Stack, values: Sequence[Value], **others: str) -> dict[str, str]:
        """Logical ids and types of the resources that a stack has with these values, some of them others."""
        known = {one.parameter.name: one.value for one in values} | others
        return wanted_resources(read(stack), known, self.cloud.region)

    def _check(self, stack: Stack, values: Sequence[Value]) -> None:
        """Everything that the template wants is really there."""
        name = self.stack_name(stack)
        found = {one["LogicalResourceId"] for one in check_physical_ids(self.cloud, name)}
        wanted = self._wanted(stack, values)
        if lacking := sorted(wanted.keys() - found):
            raise DeploymentError(f"the stack {name} is told to be complete, but it lacks {', '.join(lacking)}")
        if self.cloud.endpoint and any(one.parameter.name == "Endpoint" for one in values):
            on_aws = self._wanted(stack, values, Endpoint="")
            left_out = [f"{one} ({type_})" for one, type_ in on_aws.items() if one not in wanted]
            if left_out:
                self.console.print(f"  left out on a local engine: {escape(', '.join(left_out))}", highlight=False)
        state = state_of(self.cloud, name)
        assert state is not None
        self.outputs |= state.outputs
        for key, value in state.outputs.items():
            self.console.print(f"  {key}: {escape(value)}", highlight=False, soft_wrap=True)

    def _values(
        self, stack: Stack, parameters: Mapping[str, Parameter], given: Mapping[str, str], before: Mapping[str, str]
    ) -> tuple[list[Value], list[Parameter]]:
        local = made_locally(self.cloud, before) if self.cloud.endpoint else {}

        def decide(code: Mapping[str, str]) -> tuple[list[Value], list[Parameter]]:
            made = {**self._made, **local, **code}
            return values_of(stack.name, parameters, given=given, outputs=self.outputs, made=made, before=before)

        is_placed = "Subnets" in self._made or "Subnets" in before or "Subnets" in given
        if "Subnets" in parameters and not is_placed and (found := default_subnets(self.cloud)):
            self._made["Subnets"] = found
        values, missing = decide({})
        if not {one.name for one in missing} - PLACES:  # code is made when nothing else is lacking
            known = {one.parameter.name: one.value for one in values}
            values, missing = decide(self.code.make(stack.name, parameters, known, given, before))
        return values, missing

    def _clear(self, name: str, state: State) -> None:
        """Delete what is left of a stack that could not be made."""
        self.console.print(
            f"  the last attempt to make it failed ({state.status}); what was given then is to be given again"
        )
        if not self.agree(f"Delete what is left of {name}?"):
            raise Declined(f"{name} was left as it is")
        follower = Follower(self.cloud, self.console, state.id)
        with told(f"deleting {name}"):
            self.cloud.client("cloudformation").delete_stack(StackName=name)
        status = follower.until_done()
        if status != "DELETE_COMPLETE":
            raise why(follower, name, status)


def _parameters(state: State | None) -> dict[str, str]:
    """The values that a stack has; none of one that could not be made."""
    return {} if state is None or state.is_ruin else state.parameters
