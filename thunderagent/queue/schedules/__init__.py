"""Schedules of periodic jobs."""
