"""An engine of its own with stacks deployed to it, by the code that `scripts/deploy` runs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from rich.console import Console

from tests.infra.rendering import ROOT
from tests.support import stands

sys.path.insert(0, str(ROOT / "scripts"))

from deployment import artefacts as artefacts
from deployment.cloud import Cloud
from deployment.code import Code
from deployment.deploying import Deployment
from deployment.destroying import Destruction
from deployment.plan import STACKS, chosen
from deployment.states import state_of

REGION: Final = "us-east-1"
_NO_PORTS: Final = {"IOT_MTLS_ENABLED": "0", "SFTP_ENABLED": "0"}
"""Services of the engine that would take ports which other tests may have."""


@dataclass(slots=True)
class World:
    """A local engine, and what a deployment said."""

    endpoint: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    answers: bool = True
    width: int = 120

    @property
    def cloud(self) -> Cloud:
        """The engine, as a deployment has it."""
        return Cloud(region=REGION, endpoint=self.endpoint)

    def deploy(self, *names: str, prefix: str = "ta", **given: Any) -> Deployment:
        """Deploy stacks with options of their code, and parameters; what was said is in `said`."""
        cloud, console = self.cloud, self._console()
        options = {name: given.pop(name) for name in ("source", "folders", "bucket", "is_builtin") if name in given}
        mode = {"revert_drift": given.pop("revert_drift")} if "revert_drift" in given else {}
        code = Code(cloud=cloud, console=console, prefix=prefix, **options)
        run = Deployment(cloud=cloud, console=console, prefix=prefix, agree=self._agree, code=code, **mode)
        try:
            run.run(chosen(names), given, every=STACKS)
        finally:
            self._note(run.console)
            run.cloud.close()
        return run

    def destroy(self, *names: str, prefix: str = "ta", with_data: bool = False) -> Destruction:
        """Destroy stacks; what was said is in `said`."""
        run = Destruction(
            cloud=self.cloud, console=self._console(), prefix=prefix, agree=self._agree, with_data=with_data
        )
        try:
            run.run(chosen(names), is_all=not names)
        finally:
            self._note(run.console)
            run.cloud.close()
        return run

    def _console(self) -> Console:
        return Console(file=io.StringIO(), width=self.width, force_terminal=False)

    def _note(self, console: Console) -> None:
        assert isinstance(console.file, io.StringIO)
        self.said.append(console.file.getvalue())

    def _agree(self, question: str) -> bool:
        self.asked.append(question)
        return self.answers


@contextmanager
def engine(folder: Path, **environment: str) -> Iterator[World]:
    """An engine on a free port, ended at the end."""
    with ExitStack() as running:
        with patch.dict(os.environ, {**_NO_PORTS, **environment}):  # for the engine, and not for the tests
            endpoint = running.enter_context(stands.ministack(folder))
        yield World(endpoint)


def resources_of(world: World, stack: str) -> dict[str, dict[str, Any]]:
    """The resources of a stack by their logical ids."""
    with_client = world.cloud
    try:
        listed = with_client.client("cloudformation").list_stack_resources(StackName=stack)
        return {one["LogicalResourceId"]: one for one in listed["StackResourceSummaries"]}
    finally:
        with_client.close()


def parameters_of(world: World, stack: str) -> dict[str, str]:
    """What a stack was given."""
    cloud = world.cloud
    try:
        state = state_of(cloud, f"ta-{stack}")
    finally:
        cloud.close()
    assert state is not None
    return state.parameters
