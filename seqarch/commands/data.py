"""``seqarch data``: prepare token shards, train a tokenizer, look into a corpus."""

from __future__ import annotations

from jsonargparse import auto_cli

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Dispatch to ``prepare``, ``tokenizer`` or ``inspect``; the functions' signatures are the options."""
    import logging

    from seqarch.data.inspect import inspect
    from seqarch.data.prepare import prepare
    from seqarch.data.tokenizer import train_tokenizer

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    components = {"prepare": prepare, "tokenizer": train_tokenizer, "inspect": inspect}
    auto_cli(components, args=arguments, prog=f"seqarch {name}", parser_class=Parser)
