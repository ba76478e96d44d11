"""Samples of real text: ``python examples/text_samples.py MODEL SAMPLES TOKENS > samples.jsonl``.

Consecutive pieces of the standard library's sources, by MODEL's tokenizer; the loss mask leaves out the first eighth of
each, as if it were a prompt.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.text import standard_library_tokens

model, samples, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ids = standard_library_tokens(model, samples * tokens)
mask = [0] * (tokens // 8) + [1] * (tokens - tokens // 8)
for number in range(samples):
    piece = ids[number * tokens :][:tokens]
    print(json.dumps({"id": f"text-{number}", "input_ids": piece, "loss_mask": mask}))
