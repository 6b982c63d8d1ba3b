"""How blocks come from another engine's host tier: a transport a module, behind one interface."""
