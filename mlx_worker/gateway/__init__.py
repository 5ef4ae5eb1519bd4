"""The control plane: who may ask, which worker answers, what it took."""
