"""What the frontends share: tables of a model, and how their gradients are reduced."""
