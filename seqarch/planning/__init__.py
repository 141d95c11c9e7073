"""What a training run will need, worked out before it is started: memory, operations, time, traffic, disk."""
