"""What the author of a job writes against."""
