"""What every rank tells the launching process, which serves only when all of them capture.

SGLang goes on without a plugin that fails to load, so silence must not pass for consent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hashtap.errors import SetupError

__all__ = ["REPORT_KEY", "RankReport", "collect_reports"]

REPORT_KEY = "hashtap"
"""Where the reports stand in what SGLang's processes tell each other when they are ready."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank is ready."""

    version: str
    writes: bool  # whether this rank has a session
    boundaries: tuple[int, ...]
    unhooked: tuple[str, ...]  # hooks that SGLang did not apply; it only logs that
    info: Mapping[str, Any]  # what /hashtap/info says


def collect_reports(infos: Sequence[Mapping[str, Any]], version: str) -> list[RankReport]:
    """The reports of all ranks of this node.

    Args:
        infos: what SGLang's scheduler processes (or a controller of several) said when they were ready.
        version: the launching process's version of hashtap.

    Raises:
        SetupError: when a rank gave no report, lacks a hook, or does not agree with the others.
    """
    reports: list[RankReport] = []
    for info in infos:
        found = info.get(REPORT_KEY, ())
        expected = len(info.get("scheduler_pids", (None,)))  # a controller names those that it speaks for
        if len(found) != expected:
            raise SetupError(
                f"{expected - len(found)} of {expected} scheduler processes run without hashtap; their log says why. "
                "Is it installed in their environment, and allowed by SGLANG_PLUGINS?"
            )
        reports += found
    for report in reports:
        if report.unhooked:
            raise SetupError(f"SGLang did not apply the hooks on {', '.join(report.unhooked)}: its log says why")
        if report.version != version:
            raise SetupError(f"a rank runs hashtap {report.version}, the launching process {version}: install one")
        if report.boundaries != reports[0].boundaries:
            raise SetupError(f"the ranks capture different layers: {report.boundaries} and {reports[0].boundaries}")
    if not any(report.writes for report in reports):
        raise SetupError("no rank of this node writes captures: hashtap needs one on each node that it runs on")
    return reports
