"""The launching process serves only when every rank has said that it captures."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from hashtap.errors import SetupError
from hashtap.handshake import RankReport, collect_reports

READY = RankReport("1.0", writes=True, boundaries=(2, 4, 5), unhooked=(), info={"model": "m"})
HELPER = replace(READY, writes=False)


def info(*reports: RankReport, **more: Any) -> dict[str, Any]:
    return {"status": "ready", **({"hashtap": list(reports)} if reports else {}), **more}


def test_all_ranks_agree() -> None:
    assert collect_reports([info(READY), info(HELPER)], "1.0") == [READY, HELPER]
    assert collect_reports([info(READY, READY, scheduler_pids=[7, 8])], "1.0") == [READY, READY]
    assert pickle.loads(pickle.dumps(READY)) == READY


@pytest.mark.parametrize(
    ("infos", "reason"),
    [
        ([info()], "1 of 1 scheduler processes run without hashtap"),
        ([info(READY), info()], "1 of 1 scheduler processes run without hashtap"),
        ([info(READY, scheduler_pids=[7, 8])], "1 of 2 scheduler processes run without hashtap"),
        ([info(replace(READY, version="0.9"))], "a rank runs hashtap 0.9, the launching process 1.0"),
        ([info(READY), info(replace(HELPER, boundaries=(1, 2, 3)))], "the ranks capture different layers"),
        ([info(replace(READY, unhooked=("sglang.a.b",)))], "did not apply the hooks on sglang.a.b"),
        ([info(HELPER)], "no rank of this node writes"),
    ],
)
def test_refused(infos: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(SetupError, match=reason):
        collect_reports(infos, "1.0")
