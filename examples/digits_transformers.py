"""The same training as examples/digits.py with transformers' Trainer: the model computes its own loss."""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from stoker.examples import digits


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = digits.network()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.network(images)
        return {"loss": digits.loss(outputs, labels), "logits": outputs}


class Named(Dataset):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image, label = self.data[index]
        return {"images": image, "labels": label}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


set_seed(0)
arguments = TrainingArguments(
    output_dir="runs/digits-transformers",
    num_train_epochs=8,
    per_device_train_batch_size=64,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to="none",
)
trainer = Trainer(
    model=WithLoss(),
    args=arguments,
    train_dataset=Named(digits.train_data()),
    eval_dataset=Named(digits.test_data()),
    compute_metrics=accuracy,
)
trainer.train()
print(f"held-out accuracy {trainer.evaluate()['eval_accuracy']:.1%}")
