"""Milvus memory: the real embedded server, and a client that loses its connection."""

import builtins
import warnings

import numpy as np
import pytest
import torch

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")

from pymilvus.exceptions import MilvusException  # noqa: E402

from attnknn.core import milvus  # noqa: E402
from attnknn.core.bank import MemoryBank  # noqa: E402
from attnknn.core.milvus import MilvusAwayError, MilvusIndex  # noqa: E402

K = 7


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No waiting between tries; warnings of the client's own libraries are not ours."""
    monkeypatch.setattr(milvus, "FIRST_WAIT", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@pytest.fixture
def uri(tmp_path):
    """The file of an embedded server."""
    return str(tmp_path / "bank.db")


@pytest.fixture
def kept(blobs, uri):
    """A bank in a collection with a name."""
    return blobs.bank(index="milvus", uri=uri, collection="rows")


def test_the_embedded_server_finds_what_an_exact_search_finds(blobs, kept):
    found, exact = kept.search(blobs.queries, K), blobs.bank().search(blobs.queries, K)
    assert (found.ids == exact.ids).float().mean() > 0.99
    np.testing.assert_allclose(found.scores, exact.scores, atol=1e-5)
    own = kept.search(blobs.rows, K, exclude_ids=np.arange(101))
    assert not (own.ids == torch.arange(101)[:, None]).any()
    torch.testing.assert_close(kept.view.trust, blobs.bank().view.trust)


def test_a_bank_at_milvus_is_changed_saved_and_found_again(blobs, kept, uri, tmp_path):
    kept.add(blobs.queries, blobs.query_labels)
    assert len(kept) == 130
    assert (kept.search(blobs.queries, 1).ids.squeeze(1) == torch.arange(101, 130)).all()
    kept.remove(np.array([0, 1, 2]))
    assert (kept.search(blobs.queries, 1).ids.squeeze(1) == torch.arange(98, 127)).all()
    kept.relabel(np.array([5]), np.array([0]))
    path = kept.save(tmp_path / "bank.safetensors")
    again = MemoryBank.load(path)
    assert again.index.n_rows == 127  # nothing was sent a second time
    assert torch.equal(again.search(blobs.queries, K).ids, kept.search(blobs.queries, K).ids)
    assert again.autotune(recall=0.9, k=K)[0]["ef"] == 16


def test_a_search_from_before_a_change_answers_from_its_rows_or_refuses(blobs, uri):
    bank = blobs.bank(index="milvus", uri=uri)
    before, view = bank.index, bank.view
    bank.add(blobs.queries, blobs.query_labels)
    assert before.search(blobs.queries, K)[1].max() <= 100  # the collection holds 130
    torch.testing.assert_close(view.trust, blobs.bank().view.trust)
    bank.remove(np.array([0]))
    with pytest.raises(RuntimeError, match="search again"):
        before.search(blobs.queries, K)
    bank.close()


def test_a_collection_with_other_rows_is_refused(blobs, kept, uri):
    with pytest.raises(ValueError, match="collection must be new or hold the bank's own rows"):
        MemoryBank(
            -blobs.rows, blobs.labels, n_classes=5, index="milvus", uri=uri, collection="rows"
        )
    with pytest.raises(ValueError, match="got collection='rows' with 101 others"):
        MemoryBank(
            blobs.rows[:50],
            blobs.labels[:50],
            n_classes=5,
            index="milvus",
            uri=uri,
            collection="rows",
        )


def test_a_collection_without_a_name_goes_with_the_bank(blobs, uri):
    bank = blobs.bank(index="milvus", uri=uri)
    client, name = bank.index.store.line.client, bank.index.store.name
    assert client.has_collection(name)
    twin = bank.relabelled(blobs.labels)
    twin.add(blobs.queries, blobs.query_labels)  # a collection of its own from here on
    assert twin.index.store.name != name
    assert bank.search(blobs.queries, 101).ids.max() == 100
    bank.close()
    assert not client.has_collection(name)
    assert twin.search(blobs.queries, K).ids.shape == (29, K)
    twin.close()


class Faulty:
    """A client that loses its connection at given calls of one method."""

    def __init__(self, client, method, faults):
        self._client, self._method, self._faults = client, method, faults

    def __getattr__(self, name):
        if name == self._method and self._faults:
            error = self._faults.pop(0)
            if error is not None:
                return lambda *args, **options: (_ for _ in ()).throw(error)
        return getattr(self._client, name)


def lost():
    """Return what pymilvus raises when it cannot reach the server."""
    return MilvusException(code=2, message="Fail connecting to server, server unavailable")


def faulty_index(blobs, uri, method, faults):
    """Return an index whose connections are counted and fail as told."""
    connections = []

    def connect(uri):
        connections.append(uri)
        return Faulty(milvus._pymilvus_client(uri), method, faults)

    index = MilvusIndex(blobs.rows, uri=uri, connect=connect)
    index.extend(blobs.rows)
    return index, connections


@pytest.mark.parametrize("method", ["has_collection", "create_collection", "upsert", "search"])
def test_a_lost_connection_is_made_again(blobs, uri, method):
    index, connections = faulty_index(blobs, uri, method, [lost(), lost(), None])
    ids = index.search(blobs.queries, K)[1]
    exact = blobs.bank().search(blobs.queries, K)
    assert (ids == exact.ids.numpy()).mean() > 0.99
    assert len(connections) == 3
    assert index.n_rows == 101
    index.close()


class Cut:
    """A client whose line can be cut for good, as after a restart of the server."""

    def __init__(self, client):
        self.client, self.is_cut = client, False

    def __getattr__(self, name):
        if self.is_cut:
            raise lost()
        return getattr(self.client, name)


@pytest.mark.parametrize("search_again", [True, False])
def test_a_collection_is_dropped_through_the_line_there_is(blobs, uri, search_again):
    clients = []

    def connect(uri):
        clients.append(Cut(milvus._pymilvus_client(uri)))
        return clients[-1]

    index = MilvusIndex(blobs.rows, uri=uri, connect=connect)
    index.extend(blobs.rows)
    name, witness = index.store.name, milvus._pymilvus_client(uri)
    clients[0].is_cut = True
    if search_again:  # a second client, which the one that drops must know, too
        index.search(blobs.queries, K)
    assert witness.has_collection(name)
    index.close()
    assert len(clients) == 2
    assert not witness.has_collection(name)


def test_a_block_that_is_sent_twice_counts_once(blobs, uri, monkeypatch):
    monkeypatch.setattr(milvus, "REQUEST_BYTES", 4 * 6 * 20)  # 20 rows a request
    index, _ = faulty_index(blobs, uri, "upsert", [None, None])
    index.store.n_rows = 40
    index.extend(blobs.rows)
    ids = index.search(blobs.rows, 20)[1]
    assert all(len(set(row)) == 20 for row in ids.tolist())
    index.close()


def test_a_server_that_stays_away_is_a_clear_error(blobs, uri):
    with pytest.raises(MilvusAwayError, match="uri must lead to a running Milvus server, got uri="):
        faulty_index(blobs, uri, "has_collection", [lost() for _ in range(9)])


def test_a_server_that_is_not_there_is_a_clear_error(blobs):
    with pytest.raises(MilvusAwayError, match=r"'http://127.0.0.1:9', which did not answer in 4"):
        blobs.bank(index="milvus", uri="http://127.0.0.1:9")


def test_a_wrong_request_is_not_tried_again(blobs, uri):
    wrong = MilvusException(code=1100, message="invalid parameter")
    index, connections = faulty_index(blobs, uri, "search", [wrong])
    with pytest.raises(MilvusException, match="invalid parameter"):
        index.search(blobs.queries, K)
    assert len(connections) == 1
    index.close()


def test_without_a_uri_nothing_is_tried(blobs):
    with pytest.raises(ValueError, match=r"uri must name a Milvus server or a file .* uri=None"):
        blobs.bank(index="milvus")


def test_a_missing_package_is_named(blobs, uri, monkeypatch):
    real = builtins.__import__

    def without_pymilvus(name, *args, **options):
        if name.startswith("pymilvus"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_pymilvus)
    with pytest.raises(ImportError, match=r"pip install 'attnknn\[milvus\]'"):
        blobs.bank(index="milvus", uri=uri)
