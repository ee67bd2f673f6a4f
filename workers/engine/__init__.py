"""Training itself: plain PyTorch that runs as one process, under torchrun and under Ray. Never imports Ray."""
