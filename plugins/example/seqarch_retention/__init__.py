"""RetNet's retention as a seqarch plugin: the example to copy from."""

from seqarch_retention.retention import Retention

__all__ = ["Retention"]
