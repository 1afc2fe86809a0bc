import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "face"))
import ranks  # noqa: E402

ranks.CASE_SECONDS = 600  # a compiler may run in a case


@pytest.fixture(scope="session")
def rank_pool():
    pool = ranks.RankPool(2)
    yield pool
    pool.close()
