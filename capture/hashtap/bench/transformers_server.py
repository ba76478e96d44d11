"""transformers behind the same request: one forward a prompt, ``output_hidden_states``, one ``torch.save`` each.

Started as a process of its own by the benchmark, so that it can be paused and measured like a server.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hashtap.layers import choose_boundaries

__all__ = ["main"]


def main() -> None:
    """Serve ``GET /health`` and ``POST /generate`` until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    answer = _load(options.model_path, options.layers, options.out)
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time:
                got = answer(body["input_ids"], body["rid"])
            self._reply({"got": got})

        def _reply(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


def _load(model_path: str, layers: list[int] | None, out: Path) -> Any:
    import torch
    from transformers import AutoModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(model_path, dtype="auto").to(device).eval()
    boundaries = choose_boundaries(layers, model.config.num_hidden_layers)

    def answer(input_ids: list[int], rid: str) -> dict[str, int]:
        with torch.inference_mode():
            states = model(torch.tensor([input_ids], device=device), output_hidden_states=True, use_cache=False)
        # The last one is after the final norm, as hashtap's final state is.
        kept = [states.hidden_states[boundary][0].cpu() for boundary in (*boundaries, -1)]
        path = out / f"{rid}.pt"
        torch.save(kept, path)
        return {"rows": len(kept[0]), "width": sum(layer.shape[1] for layer in kept), "bytes": path.stat().st_size}

    return answer


if __name__ == "__main__":
    main()
