import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "face"))
from ranks import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool(2)
    yield pool
    pool.close()
