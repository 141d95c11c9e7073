"""Numerics that several mixers share. Layout of heads: ``[B, T, H, D]``."""
