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
    "BatchExecuteStatement": "PartiQLInsert",
    "SendMessageBatch": "SendMessage",
    "DeleteMessageBatch": "DeleteMessage",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
}
"""The permission of an action, where it has another name."""


def record(path: str) -> None:
    """Note each action once, as `service:Action` and, if it names a table, as `service:Action/Table`."""
    ask, guard = BaseClient._make_api_call, threading.Lock()
    noted: set[str] = set()

    def make_api_call(client: Any, action: str, arguments: Any) -> Any:
        told = f"{client.meta.service_model.service_name}:{PERMISSIONS.get(action, action)}"
        tables = arguments.get("RequestItems", ()) or [one for one in (arguments.get("TableName"),) if one]
        with guard:
            for one in {told, *(f"{told}/{table}" for table in tables)} - noted:
                noted.add(one)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"{one}\n")
        return ask(client, action, arguments)

    BaseClient._make_api_call = make_api_call


if __name__ == "__main__":
    record(os.environ.pop(RECORD))
    main()
