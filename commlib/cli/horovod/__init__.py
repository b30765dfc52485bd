"""`commlib install-horovod`: builds Horovod's last release against the torch that is here."""
