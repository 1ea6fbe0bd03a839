"""Jobs that break the agent that runs them."""

from __future__ import annotations

import threading
import time

from tests.acceptance.workjobs.hold import hold_sync as hold_sync
from thunderagent.agent.housekeeping import Housekeeping
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job


@job("break.loop")
def break_loop(ctx: Context, payload: None) -> None:
    """Make the next round of housekeeping raise, and leave a thread behind that never ends."""

    def broken(self: Housekeeping) -> None:
        raise LookupError("a bug in the loop")

    threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()  # Python would wait for it
    Housekeeping.run_pending = broken  # type: ignore[method-assign]
