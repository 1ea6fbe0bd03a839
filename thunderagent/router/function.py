"""The router that `infra/doorbell.yaml` deploys: an event of EventBridge with a job and its payload is a task.

The right to put such events on the bus is the right to enqueue any job.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from thunderagent.queue.enqueue import EnqueueOptions
from thunderagent.router.enqueue import Enqueue
from thunderagent.router.events import EventBridgeEvent
from thunderagent.router.handler import Router

DETAIL_TYPE: Final = "ThunderAgent Task"
"""The detail type of an event that is a task."""

router = Router()


class TaskDetail(BaseModel):
    """The detail of an event: a job by its name, its payload, and options of `Client.enqueue`.

    Unknown options are refused: a misspelt one would be lost in silence.
    """

    model_config = ConfigDict(extra="forbid")

    job: str = Field(min_length=1)
    payload: dict[str, Any] = Field(default_factory=dict, repr=False)
    task_id: str | None = None
    queue: str | None = None
    delay_s: float | None = None
    run_at: float | None = None
    max_retry: int | None = None
    unique_key: str | None = None
    unique_scope: str | None = None
    limit_key: str | None = None
    limit: int | None = None
    depends_on: list[str] | None = None
    on_parent_failure: str | None = None


@router.eventbridge(detail_type=DETAIL_TYPE)
def enqueue(detail: TaskDetail, event: EventBridgeEvent) -> Enqueue:
    """One event, one task; without a `task_id` its id is made from the event."""
    options: EnqueueOptions[str] = detail.model_dump(exclude={"job", "payload"}, exclude_none=True)  # type: ignore[assignment]
    return Enqueue(detail.job, detail.payload, **options)


handler = router.handler
