"""The engine on one SQLite file."""
