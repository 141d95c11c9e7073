"""Training with Lightning: the module, optimiser, schedules, checkpoints, metrics and callbacks."""
