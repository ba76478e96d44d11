"""The losses in a log of speculators: ``python examples/plot_losses.py train.log losses.svg``."""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

log = Path(sys.argv[1]).read_text()
train = [float(loss) for loss in re.findall(r"train/loss=([\d.e+-]+)", log)]
validation = [float(loss) for loss in re.findall(r"val/loss_epoch=([\d.e+-]+)", log)]
per_epoch = len(train) / len(validation)

figure, axes = pyplot.subplots(figsize=(7, 3.5))
axes.plot(range(1, len(train) + 1), train, label="training, every step")
axes.plot([per_epoch * (epoch + 1) for epoch in range(len(validation))], validation, "o-", label="validation")
axes.set(xlabel="step", ylabel="loss, sum of 3 drafted tokens", yscale="log")
axes.legend()
axes.grid(alpha=0.3, which="both")
figure.tight_layout()
figure.savefig(sys.argv[2])
ends = [f"{losses[0]:.2f} to {losses[-1]:.2f}" for losses in (train, validation)]
print(f"{len(train)} steps: loss {ends[0]}; validation {ends[1]}")
