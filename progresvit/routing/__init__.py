"""When to stop."""

from progresvit.routing.entropy import top10_entropy

__all__ = ["top10_entropy"]
