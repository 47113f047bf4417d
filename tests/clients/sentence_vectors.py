"""Writes the files with which sentence-transformers describes a model, and prints the vectors that it makes."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer


def main(folder: Path, mode: str, is_normalized: bool, texts: list[str]) -> None:
    torch.set_num_threads(1)
    transformer = Transformer(str(folder))
    modules = [transformer, Pooling(transformer.get_word_embedding_dimension(), pooling_mode=mode)]
    with tempfile.TemporaryDirectory() as saved:
        SentenceTransformer(modules=[*modules, *([Normalize()] if is_normalized else [])], device="cpu").save(saved)
        # The weights stay as they are, with the head for tokens, which sentence-transformers leaves out.
        for path in Path(saved).iterdir():
            if path.name == "modules.json":
                shutil.copy(path, folder)
            elif path.is_dir():
                shutil.copytree(path, folder / path.name)
    options = {"dtype": torch.float32}
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs=options)
    print(json.dumps([vector.tolist() for vector in model.encode(texts)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4]))
