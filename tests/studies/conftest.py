"""Two seeds of a tiny training, which the tests of all studies share."""

import pytest

from attnknn.core.bank import MemoryBank
from attnknn.embed import run as trained_module
from attnknn.embed.run import train_run
from attnknn.studies import main
from tests.tiny import SMALL, config, tiny_splits


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two seeds of a tiny training."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_module, "load_splits", lambda *_, **__: tiny_splits())
        settings = [config(SMALL, seed=seed, epochs=4, lr=200.0) for seed in (0, 1)]
        made = [train_run(s, folder / f"seed{s.seed}", progress=False) for s in settings]
        for run in made:
            assert run.splits.name == "tiny"  # read while the data is at hand
    return made  # not from inside: the data would be tiny for all other tests of this process


@pytest.fixture(scope="session")
def results(runs):
    """Main results of both seeds."""
    return main.main_results(runs, k_eval=11, k_baseline=5, k_ensemble=(3, 5), tta_views=3)


@pytest.fixture
def searches(monkeypatch):
    """How many neighbours each search asked for."""
    asked, search = [], MemoryBank.search

    def counted(bank, queries, k, **options):
        asked.append(k)
        return search(bank, queries, k, **options)

    monkeypatch.setattr(MemoryBank, "search", counted)
    return asked
