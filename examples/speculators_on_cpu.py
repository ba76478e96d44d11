"""speculators' command line on a machine without an accelerator, with hashtap's backend known to it.

``python examples/speculators_on_cpu.py train ...``. speculators 0.9.0 asks torch for an accelerator in two places and
has no option against it; everything else is the released package.
"""

import torch
from speculators.train import trainer

from hashtap.trainers import speculators

trainer.get_local_rank = lambda: torch.device("cpu")
torch.accelerator.synchronize = lambda *_: None

if __name__ == "__main__":
    speculators.main()
