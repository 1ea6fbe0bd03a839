"""`thunderagent doctor`: the checks of an installation, each with what was found and its remedy."""
