"""A small convolutional network on handwritten digits. Stop it at any step, run it again: it goes on."""

import stoker
from stoker.examples import digits

result = stoker.Trainer(
    model=digits.network,
    loss=digits.loss,
    data=digits.train_data(),
    evaluate=digits.test_data(),
    epochs=8,
    batch=64,
    lr=3e-3,
    output="runs/digits",
).fit()
assert result.evaluation is not None and result.evaluation.accuracy is not None
print(f"held-out accuracy {result.evaluation.accuracy:.1%}")
