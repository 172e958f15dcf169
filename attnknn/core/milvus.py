"""Milvus: rows searched by a server, or by the version embedded in a file (milvus-lite).

The bank keeps its rows (in memory, or as a memory-mapped file) for prototypes and leave-one-out
labels; the server keeps a copy of them with the row number as the key, and searches.

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from attnknn.core.index import Found, Index

GRAPH = {"M": 32, "efConstruction": 200}
EF_LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
EF_START = 64
REQUEST_BYTES = 4_000_000  # of one request; a server refuses those of more than 64 MB
MANY_BLOCKS = 20  # from here on a progress bar is shown
TRIES, FIRST_WAIT = 4, 0.25  # seconds; doubled after each try
TIMEOUT = 60.0  # seconds a single request may take, the client's own retries included
SAMPLE = 32  # rows that are compared before a collection of the same name is trusted


class MilvusAwayError(ConnectionError):
    """The server does not answer, also after several tries."""


class MilvusIndex(Index):
    """A Milvus collection with a graph index over unit rows.

    An index that has grown shares the collection with the one it grew from, which looks past the
    rows that are new; two banks that share one part ways when one of them grows.

    Args:
        rows: The rows it is made for.
        uri: ``http://host:19530``, or the path of an embedded data base, ending in ``.db``.
        collection: Name of a collection that is kept for the next process. One that is there
            already is used, and completed, if it holds the same rows. None makes one with a name
            of its own and drops it when the index is no longer used.
        connect: Makes a client from a uri; pymilvus does by default.
    """

    name = "milvus"

    def __init__(
        self,
        rows: Float[np.ndarray, "N D"],
        *,
        uri: str | None,
        collection: str | None = None,
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__()
        if not uri:
            raise ValueError(f"uri must name a Milvus server or a file ending in .db, got {uri=}")
        self.collection = collection
        self.knobs, self.settings = {"ef": EF_LADDER}, {"ef": EF_START}
        self.store = _Store(_Line(str(uri), connect or _pymilvus_client), collection, rows)
        self.n_rows = self.store.n_rows

    def extend(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Send the rows that the collection does not have yet."""
        self.store.send(rows)
        self.n_rows = len(rows)

    def grown(self, rows: Float[np.ndarray, "N D"]) -> Index:
        """Return an index over more rows, in a collection of its own where two banks use this."""
        if not self.store.is_shared and self.n_rows == self.store.n_rows:
            return super().grown(rows)
        twin = MilvusIndex(rows, uri=self.store.line.uri, connect=self.store.line.connect)
        twin.tune(self.settings)
        twin.extend(rows)
        return twin

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Found:
        """Return cosines, largest first, and row ids; id -1 where fewer than k were found."""
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        ids = np.full((len(queries), k), -1, dtype=np.int64)
        step = max(1, REQUEST_BYTES // (4 * max(queries.shape[1], 4 * k)))
        for start in range(0, len(queries), step):
            block = list(queries[start : start + step])
            for place, hits in enumerate(self._hits(block, k), start):
                ids[place, : len(hits)] = [hit["id"] for hit in hits]
                scores[place, : len(hits)] = [hit["distance"] for hit in hits]
        return scores, ids

    def _hits(self, queries: list[Float[np.ndarray, " D"]], k: int) -> Any:
        depth = max(self.settings["ef"], k)  # Milvus wants ef of at least k
        return self.store.call(
            "search",
            data=queries,
            limit=k,
            anns_field="row",
            output_fields=["id"],
            filter=f"id < {self.n_rows}" if self.n_rows < self.store.n_rows else "",
            search_params={"metric_type": "IP", "params": {"ef": depth}},
            consistency_level="Strong",
        )

    def share(self) -> None:
        """Take note that a second bank searches this index."""
        self.store.is_shared = True

    def close(self) -> None:
        """Drop the collection, unless it was given a name to be kept by."""
        self.store.forget()

    def discard(self) -> str | None:
        """Drop the collection, but not that of a second bank; return the name that is free."""
        if self.store.is_shared:
            return None
        self.store.drop()
        return self.collection


class _Store:
    """A collection at a server, and how many rows it has; all indexes over it have this one.

    Args:
        line: The way to the server.
        name: Name to be kept by; None drops the collection when no index uses it any more.
        rows: The rows it is for; those that are there already must be the first of them.
    """

    def __init__(self, line: "_Line", name: str | None, rows: Float[np.ndarray, "N D"]) -> None:
        self.line, self.name = line, name or f"attnknn_{uuid.uuid4().hex}"
        self.is_shared = self.is_gone = False
        self.n_rows = self._open(rows)
        # Without a name of the user's choice nobody could find the collection again.
        action = _drop if name is None else _keep
        self.forget = weakref.finalize(self, action, line, self.name)
        self.forget.atexit = False  # a process that ends does not wait for a server

    def call(self, method: str, **options: Any) -> Any:
        """Call a method of the client for this collection."""
        if self.is_gone:
            raise RuntimeError("the bank has changed since this search: search again")
        return self.line.call(method, self.name, **options)

    def send(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Send the rows that are not there yet."""
        step = max(1, REQUEST_BYTES // (4 * rows.shape[1]))
        starts = range(self.n_rows, len(rows), step)
        for start in tqdm(starts, desc="to Milvus", disable=len(starts) < MANY_BLOCKS, leave=False):
            block = rows[start : start + step]
            data = [{"id": start + i, "row": row} for i, row in enumerate(block)]
            # Keys are row numbers: a block that is sent twice, after a lost answer, counts once.
            self.call("upsert", data=data)
            self.n_rows = start + len(block)

    def drop(self) -> None:
        """Drop the collection, before another is built in its place."""
        self.forget.detach()
        self.call("drop_collection")
        self.is_gone = True

    def _open(self, rows: Float[np.ndarray, "N D"]) -> int:
        """Make or find the collection; return the number of rows it has."""
        if not self.call("has_collection"):
            schema = _schema(rows.shape[1])
            self.call("create_collection", schema=schema, index_params=_graph())
            return 0
        self.call("load_collection")
        options = {"filter": "", "output_fields": ["count(*)"], "consistency_level": "Strong"}
        n_rows = int(self.call("query", **options)[0]["count(*)"])
        if n_rows > len(rows) or not self._holds(rows[:n_rows]):
            raise ValueError(
                "collection must be new or hold the bank's own rows, got "
                f"collection={self.name!r} with {n_rows} others"
            )
        return n_rows

    def _holds(self, rows: Float[np.ndarray, "N D"]) -> bool:
        """Return whether a sample of the rows is there as it should be."""
        if not len(rows):
            return True
        ids = np.unique(np.linspace(0, len(rows) - 1, SAMPLE).astype(int)).tolist()
        hits = self.call("get", ids=ids, output_fields=["id", "row"])
        there = {hit["id"]: np.asarray(hit["row"], dtype=np.float32) for hit in hits}
        same_width = all(row.shape == rows[0].shape for row in there.values())
        return (
            there.keys() >= set(ids)
            and same_width
            and all(np.allclose(there[i], rows[i], atol=1e-6) for i in ids)
        )


class _Line:
    """The way to a server: a client that is made when needed, and made again when it is lost.

    It is no part of the index, so that what drops a collection after the index can use it, too.
    """

    def __init__(self, uri: str, connect: Callable[[str], Any]) -> None:
        self.uri, self.connect = uri, connect
        self.client: Any = None

    def call(self, method: str, *args: Any, tries: int = TRIES, **options: Any) -> Any:
        """Call the client; after a lost connection, connect anew and try again."""
        wait = FIRST_WAIT
        for left in reversed(range(tries)):
            try:
                if self.client is None:
                    self.client = self.connect(self.uri)
                return getattr(self.client, method)(*args, timeout=TIMEOUT, **options)
            except ImportError:
                raise
            except Exception as error:
                if not is_lost_connection(error):
                    raise
                if not left:
                    raise MilvusAwayError(
                        f"uri must lead to a running Milvus server, got uri={self.uri!r}, which did"
                        f" not answer in {tries} tries ({_reason(error)})"
                    ) from error
                self.client = None
                time.sleep(wait)
                wait *= 2


def is_lost_connection(error: Exception) -> bool:
    """Return whether another try may help: the server or the line is away, the request is fine."""
    import grpc
    from pymilvus import exceptions

    away = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    if isinstance(error, grpc.RpcError):
        return error.code() in away
    if isinstance(
        error,
        ConnectionError
        | exceptions.MilvusUnavailableException
        | exceptions.ConnectionNotExistException,
    ):
        return True
    if isinstance(error, exceptions.MilvusException):
        # 2 is "connect failed"; a client that gave up its own retries passes the code of gRPC on.
        return error.code in (2, *away) or "Retry timeout" in str(error.message)
    return isinstance(error, ValueError) and "closed channel" in str(error)


def _pymilvus_client(uri: str) -> Any:
    try:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import ConnectionConfigException
    except ImportError:
        raise ImportError(_NEEDS_EXTRA) from None
    try:
        return MilvusClient(uri=uri, timeout=TIMEOUT)
    except ConnectionConfigException as error:
        if "milvus-lite" in str(error) or "milvus_lite" in str(error):
            raise ImportError(_NEEDS_EXTRA) from None
        raise ValueError(f"uri must name a Milvus server or a file, got {uri=} ({error})") from None


_NEEDS_EXTRA = "index='milvus' needs packages that are not installed: pip install 'attnknn[milvus]'"


def _schema(dim: int) -> Any:
    from pymilvus import DataType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("row", DataType.FLOAT_VECTOR, dim=dim)
    return schema


def _graph() -> Any:
    from pymilvus import MilvusClient

    params = MilvusClient.prepare_index_params()
    params.add_index(field_name="row", index_type="HNSW", metric_type="IP", params=GRAPH)
    return params


def _drop(line: _Line, collection: str) -> None:
    """Drop a collection that nobody else can know; a server that stays away keeps it."""
    with suppress(MilvusAwayError):  # a second try is for a line that was lost since
        line.call("drop_collection", collection, tries=2)


def _keep(line: _Line, collection: str) -> None:
    """Leave a collection for the next process."""


def _reason(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", "") or error).split())
