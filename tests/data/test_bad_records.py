"""Records that are valid JSON, or nearly, and still no documents."""

import pytest

from seqarch.data.records import Block, parse_block


def parse(text, domain=None):
    return list(parse_block(Block("jsonl", "x.jsonl", text.encode(), 0), "text", domain))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "meta": {"redpajama_set_name": ["x"]}}', r"line 1: unknown meta.redpajama_set_name"),
        ('{"text": "a", "meta": {"redpajama_set_name": {"a": 1}}}', r"line 1: unknown meta.redpajama_set_name"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", r"line 1: JSON that cannot be read .*limit"),
        ('{"text": ' + "[" * 200_000 + "}", r"line 1: (JSON that cannot be read|not valid JSON)"),
    ],
)
def test_odd_records_name_file_and_line(line, message):
    with pytest.raises(ValueError, match=rf"x\.jsonl, {message}"):
        parse(line)


def test_a_byte_order_mark_is_no_text():
    (document,) = parse('\ufeff{"text": "a"}', domain="cc")
    assert document.text == "a"
