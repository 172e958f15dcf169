"""scikit-learn's own checks of an estimator, all of them."""

from functools import partial

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from attnknn import AttnKNNClassifier
from attnknn.config import FittingConfig
from attnknn.estimator import fitting


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """The checks are about the interface; the one that asks for accuracy is easily met."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "FittingConfig", partial(FittingConfig, fit_epochs=2))
        yield


@pytest.mark.slow
@parametrize_with_checks([AttnKNNClassifier()])
def test_scikit_learn_estimator_checks(estimator, check):
    check(estimator)
