"""The `commlib` command."""
