"""`python -m thunderagent` is the command `thunderagent`."""

from thunderagent.cli import main

main()
