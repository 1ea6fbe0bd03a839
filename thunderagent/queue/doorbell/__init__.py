"""Doorbells: how rings travel. `opening.open_doorbell` picks one by the settings."""
