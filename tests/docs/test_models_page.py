"""Every architecture of transformers is served and compared, or refused with the missing feature."""

from __future__ import annotations

from loramux.engine.architectures.missing_features import MISSING_FEATURES
from loramux.engine.architectures.multimodal import SUPPORTED
from tests.docs.models_page import architectures, compared


def test_each_architecture_is_served_or_lacks_a_feature() -> None:
    assert architectures() - SUPPORTED - MISSING_FEATURES.keys() == set()
    assert SUPPORTED & MISSING_FEATURES.keys() == set()
    assert len(architectures()) > 200


def test_each_served_architecture_is_compared_with_transformers() -> None:
    assert compared().keys() >= SUPPORTED
