"""scikit-learn's own checks of an estimator, all of them."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from attnknn import AttnKNNClassifier
from attnknn.core import refine


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """The checks are about the interface; the one that asks for accuracy is easily met."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(refine.REFINE, "auto", (0, 2))
        yield


@pytest.mark.slow
@parametrize_with_checks([AttnKNNClassifier()])
def test_scikit_learn_estimator_checks(estimator, check):
    check(estimator)
