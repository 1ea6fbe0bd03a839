"""`thunderagent run`, and a file with every action that it asks of AWS: `python -m tests.infra.recorded_agent …`."""

from __future__ import annotations

import os
import threading
from typing import Any, Final

from botocore.client import BaseClient

from thunderagent.cli import main

RECORD: Final = "RECORD_ACTIONS"
"""Variable with the file."""

PERMISSIONS: Final = {
    "SendMessageBatch": "SendMessage",
    "DeleteMessageBatch": "DeleteMessage",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
}
"""The permission of an action, where it has another name."""


def record(path: str) -> None:
    """Note each action once, as `service:Action`."""
    ask, guard, noted = BaseClient._make_api_call, threading.Lock(), set()

    def make_api_call(client: Any, action: str, arguments: Any) -> Any:
        told = f"{client.meta.service_model.service_name}:{PERMISSIONS.get(action, action)}"
        with guard:
            if told not in noted:
                noted.add(told)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"{told}\n")
        return ask(client, action, arguments)

    BaseClient._make_api_call = make_api_call


if __name__ == "__main__":
    record(os.environ.pop(RECORD))
    main()
