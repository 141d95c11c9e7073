"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, *, unit: str, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a bar while the body runs; calling what it yields with a number advances it by that many ``unit``."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )

    def amount(n: float) -> str:
        of = "" if total is None else f" / {total:,}"
        return f"{int(n):,}{of} {unit}"

    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, completed=done, amount=amount(done))
        count = done

        def advance(n: int) -> None:
            nonlocal count
            count += n
            progress.update(task, completed=count, amount=amount(count))

        yield advance
