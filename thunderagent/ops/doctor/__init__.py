"""`thunderagent doctor`: the checks of an installation, each with its findings and remedies."""
