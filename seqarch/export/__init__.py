"""Trained models in other programs' formats, and back."""
