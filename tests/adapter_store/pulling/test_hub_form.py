"""The stand-in speaks the hub's form: Hugging Face's own client reads it, and documented responses are understood."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, snapshot_download

from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.hub.hub_files import Digest
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.adapter_store.pulling.needed_files import needed_files
from loramux.adapter_store.pulling.remote import HubRemote
from tests.adapter_store.hub.local_hub import Answer, LocalHub
from tests.adapter_store.pulling.pulled import BASE, FILES, NEEDED, WEIGHTS, Pulls, contents


def test_huggingface_hub_reads_the_same_repository(hub: LocalHub, pulls: Pulls, tmp_path: Path) -> None:
    commit = hub.revisions[BASE, "main"]
    theirs = HfApi(endpoint=hub.url, token=False)
    info = theirs.model_info(BASE, revision="main", files_metadata=True)
    listing = HubClient(hub.url).listing(BASE, "main")
    assert info.sha == listing.commit == commit
    assert info.siblings is not None
    found = {}
    for one in info.siblings:
        digest = one.blob_id if one.lfs is None else one.lfs.sha256
        algorithm = "git" if one.lfs is None else "sha256"
        found[one.rfilename] = (one.size if one.lfs is None else one.lfs.size, (algorithm, digest))
    ours = {name: dataclasses.astuple(file)[1:] for name, file in listing.files.items() if file is not None}
    assert ours == found
    assert ours.keys() == FILES.keys()
    for name in NEEDED:
        file = HubClient(hub.url).file(BASE, commit, name)
        theirs_of_it = get_hf_file_metadata(hf_hub_url(BASE, name, revision=commit, endpoint=hub.url), token=False)
        assert (file.size, file.digest.value) == (theirs_of_it.size, theirs_of_it.etag)
    directory = snapshot_download(
        BASE, revision="main", endpoint=hub.url, local_dir=tmp_path / "theirs", allow_patterns=list(NEEDED), token=False
    )
    downloaded = {name: content for name, content in contents(Path(directory)).items() if not name.startswith(".cache")}
    assert downloaded == contents(pulls().path) == NEEDED


COMMIT = "7e27bd9f95328f0f3b08261d1252705110c806f8"
CONFIG = b'{"model_type": "llama"}'
LISTING = {
    "_id": "6723884218f2f2b76a0d6edc",
    "id": "acme/tiny-base",
    "private": False,
    "pipeline_tag": "text-generation",
    "library_name": "transformers",
    "tags": ["transformers", "safetensors", "llama", "license:apache-2.0", "region:us"],
    "downloads": 812345,
    "likes": 301,
    "modelId": "acme/tiny-base",
    "author": "acme",
    "sha": COMMIT,
    "lastModified": "2025-02-06T16:32:33.000Z",
    "gated": False,
    "disabled": False,
    "config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "cardData": {"license": "apache-2.0", "language": ["en"]},
    "siblings": [
        {"rfilename": ".gitattributes", "size": 1519, "blobId": "a6344aac8c09253b3b630fb776ae94478aa0275b"},
        {
            "rfilename": "config.json",
            "size": len(CONFIG),
            "blobId": hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest(),
        },
        {
            "rfilename": "model.safetensors",
            "size": 383865448,
            "blobId": "2414184f64bda500ff7d0997c6a5e1a5bf69f84f",
            "lfs": {
                "sha256": "07f700e293baeaf3cd4240c3df1a948c4403f16961ea7979e86c8d6a9f8fd466",
                "size": 383865448,
                "pointerSize": 134,
            },
        },
    ],
    "spaces": [],
    "createdAt": "2024-10-31T13:38:10.000Z",
    "safetensors": {"parameters": {"BF16": 134515008}, "total": 134515008},
    "usedStorage": 4304968832,
}
"""A response to /api/models/OWNER/NAME/revision/REVISION?blobs=true with all of the hub's fields."""

LINKED = {
    "x-repo-commit": COMMIT,
    "accept-ranges": "bytes",
    "x-linked-size": "383865448",
    "x-linked-etag": '"07f700e293baeaf3cd4240c3df1a948c4403f16961ea7979e86c8d6a9f8fd466"',
    "x-xet-hash": "94cb43e366d97765e4e950cfabd3ea29445cf28d824f3f2a73dcabf13dfb4854",
    "link": '<https://huggingface.co/api/models/acme/tiny-base/xet-read-token/7e27>; rel="xet-auth"',
    "location": "https://us.aws.cdn.hf.co/xet-bridge-us/6723/94cb?X-Xet-Cas-Uid=public&Signature=x",
}
"""Headers of a 302 to a large file. The ETag of the file's own response would be the Xet hash, not the SHA-256."""


def test_documented_responses_are_understood(hub: LocalHub) -> None:
    hub.faults["/revision/"] = lambda answer: setattr(answer, "body", json.dumps(LISTING).encode())
    remote = HubRemote(HubClient(hub.url), BASE, "main")
    small, weights = needed_files(remote, ModelName.parse(BASE))
    assert [(file.name, file.size) for file in small] == [("config.json", len(CONFIG))]
    (file,) = weights
    assert file.digest is not None
    assert (file.size, file.digest.algorithm) == (383865448, "sha256")
    assert (remote.commit(small), file.digest.value) == (COMMIT, LISTING["siblings"][2]["lfs"]["sha256"])


def test_hash_comes_from_the_redirect_and_not_from_the_store(hub: LocalHub) -> None:
    def linked(answer: Answer) -> None:
        answer.status, answer.body, answer.headers = 302, b"Found. Redirecting to", dict(LINKED)

    hub.faults["/resolve/"] = linked
    file = HubClient(hub.url).file(BASE, COMMIT, "model.safetensors")
    assert (file.size, file.digest) == (383865448, Digest("sha256", LINKED["x-linked-etag"].strip('"')))


def test_small_file_is_described_by_the_response_behind_the_redirect(hub: LocalHub) -> None:
    commit = hub.revisions[BASE, "main"]
    file = HubClient(hub.url).file(BASE, commit, "config.json")
    content = NEEDED["config.json"]
    digest = Digest("git", hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())
    assert (file.size, file.digest) == (len(content), digest)
    assert not set(WEIGHTS).intersection(path for path, _ in hub.requests)
