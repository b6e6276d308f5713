"""What the commands beside ``serve`` do. The command line itself is in ``proxy.cli.commands``."""
