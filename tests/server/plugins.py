"""A second plugin of SGLang's, beside hashtap, in the servers that a test starts."""

from pathlib import Path

__all__ = ["plugin"]


def plugin(path: Path, code: str) -> dict[str, str]:
    """An installed distribution whose ``register`` is in ``code``; the environment by which servers find it."""
    info = path / "for_a_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: for-a-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nfor_a_test = for_a_test:register\n")
    (path / "for_a_test.py").write_text(code)
    return {"PYTHONPATH": str(path)}
