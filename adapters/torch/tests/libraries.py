"""Other people's libraries on the backend, on two ranks, where they are installed:

  torchrun --nproc-per-node=2 adapters/torch/tests/libraries.py accelerate|transformers|lightning

Each trains a line through points that every rank has a part of, and must end with equal parameters on both ranks and with
the backend "chorale". Not part of any other run: they take gigabytes.
"""

import sys
import tempfile

import torch
import torch.distributed as dist

POINTS = torch.arange(64, dtype=torch.float32).reshape(-1, 1) / 64
TARGETS = 3 * POINTS - 1


def check(name, model):
    assert dist.get_backend() == "chorale", dist.get_backend()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both), both
    assert not torch.equal(mine, start()), mine
    print(f"{name}: rank {dist.get_rank()} is well\n", end="", flush=True)


def line():
    torch.manual_seed(1)
    return torch.nn.Linear(1, 1)


def start():
    return torch.cat([p.detach().flatten() for p in line().parameters()])


def accelerate():
    from accelerate import Accelerator

    dist.init_process_group("chorale")
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(POINTS, TARGETS), batch_size=8)
    model = line()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    check("accelerate", model)


def transformers():
    from transformers import Trainer, TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = line()

        def forward(self, x, y):
            return {"loss": torch.nn.functional.mse_loss(self.line(x), y)}

    dist.init_process_group("chorale")
    data = [{"x": x, "y": y} for x, y in zip(POINTS, TARGETS)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, max_steps=4, learning_rate=0.1,
                                      per_device_train_batch_size=8, save_strategy="no", report_to=[],
                                      remove_unused_columns=False, disable_tqdm=True)
        model = Line()
        Trainer(model, arguments, train_dataset=data).train()
        check("transformers", model)


def lightning():
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = line()

        def training_step(self, batch, index):
            loss = torch.nn.functional.mse_loss(self.line(batch[0]), batch[1])
            self.log("seen", 8 + 4 * self.global_rank, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(POINTS, TARGETS), batch_size=8)
    model = Line()
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="chorale"),
                                max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, loader)
    assert trainer.logged_metrics["seen"] == 10, trainer.logged_metrics
    check("lightning", model)


if __name__ == "__main__":
    {"accelerate": accelerate, "transformers": transformers, "lightning": lightning}[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
