"""The demo: a word-level language model, its gradients averaged in several ways."""
