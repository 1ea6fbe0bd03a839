"""What tests of the clients share with those of the API."""

from __future__ import annotations

from tests.wsapi.conftest import unhurried as unhurried
