"""Models, in plain PyTorch."""
