"""Trains a small network on all ranks of the job: mpirun -n 4 python examples/minimal.py."""

import torch
from torch import nn

import mpidl

comm = mpidl.init()  # 1: joins the ranks that mpirun started

torch.manual_seed(0)
points = 2 * torch.rand(8192, 2) - 1  # in a square; a point's class is its ring around the middle, 0 to 4
rings = (3 * points.norm(dim=1)).long()
dataset = torch.utils.data.TensorDataset(points, rings)
loader = mpidl.data.DataLoader(dataset, batch_size=64, shuffle=True)  # 2: gives each rank its part of the data

model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 5))
optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=3e-3)  # 3: in place of torch.optim.AdamW(...)

for epoch in range(10):
    loader.set_epoch(epoch)  # another order of the data in each epoch
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    comm.all_reduce(mean, "avg")  # the mean over all ranks
    if comm.rank == 0:
        print(f"epoch {epoch + 1:2d} of 10  loss {mean.item():.4f}", flush=True)

weights = optimizer.model_state_dict()  # on rank 0: the whole model's, as from a plain model.state_dict()
