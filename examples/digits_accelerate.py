"""The same training as examples/digits.py with Accelerate: without metrics on disk, checkpoints or resume."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from stoker.examples import digits

EPOCHS = 8
set_seed(0)
accelerator = Accelerator()
model = digits.network()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
train = DataLoader(digits.train_data(), batch_size=64, shuffle=True)
test = DataLoader(digits.test_data(), batch_size=256)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train))
model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
for epoch in range(EPOCHS):
    model.train()
    for images, labels in train:
        optimizer.zero_grad()
        loss = digits.loss(model(images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in test:
            guesses, wanted = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            correct += int((guesses == wanted).sum())
            total += len(wanted)
    accelerator.print(f"epoch {epoch + 1}: held-out accuracy {correct / total:.1%}")
