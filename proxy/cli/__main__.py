"""Run the command line as ``python -m proxy.cli``."""

from proxy.cli.commands import main

main()
