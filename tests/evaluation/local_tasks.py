"""Task files for lm-eval whose data are JSON lines beside them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.evaluation.trained_models import text

_CHOICE = """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
_ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
_GENERATE = """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: [" the"], max_gen_toks: 10, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
KINDS = {"choice": _CHOICE, "rolling": _ROLLING, "generate": _GENERATE}


def write_tasks(folder: Path, n: int = 7) -> Path:
    """A task of each kind, named ``local_<kind>``, over n documents of different lengths."""
    data = folder / "documents.jsonl"
    rows = [
        {"text": text(4 + 9 * i % 31, i), "choices": [text(1 + j, 100 + i + j) for j in range(3)], "answer": i % 3}
        for i in range(n)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, body in KINDS.items():
        head = f"task: local_{kind}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{kind}.yaml").write_text(f"{head}test_split: test\n{body}")
    return folder
