"""A real SGLang server on this machine's CPU, as a child process that is always cleaned up."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hashtap.bench import servers
from hashtap.bench.servers import ServerFailed, cpu_environment, sglang_command

__all__ = ["Server", "ServerFailed"]


class Server(servers.Server):
    """``python -m sglang.launch_server --device cpu``.

    Args:
        model: the model directory.
        flags: more flags; paths and numbers are turned into text.
        threads: OpenMP threads of the model.
        environment: added to this process's environment; its PYTHONPATH comes in front.
        log: where its output goes; a new temporary file by default.
    """

    def __init__(
        self,
        model: Path,
        *flags: object,
        threads: int | None = None,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        command = sglang_command(model, "--device", "cpu", *flags)
        more = cpu_environment(threads) | {"TRANSFORMERS_OFFLINE": "1"} | (environment or {})
        if "PYTHONPATH" in more and "PYTHONPATH" in os.environ:
            more["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        super().__init__(command, environment=more, log=log)

    def generate(
        self, input_ids: Iterable[int], *, rid: str | None = None, extra_key: str | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """The answer to one prompt of token ids, tagged for capture; ``sampling`` goes over one greedy token."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "custom_params": {"hashtap": True}} | sampling,
        }
        body |= {name: value for name, value in (("rid", rid), ("extra_key", extra_key)) if value is not None}
        answer = self.http.post("/generate", json=body, timeout=300.0)
        return dict(answer.raise_for_status().json())
