"""Writes adamw.json: torch.optim.AdamW on two parameters over five steps.

Run from this folder: python adamw.py > adamw.json
"""

import json

import torch

torch.manual_seed(0)
matrix = torch.nn.Parameter(torch.randn(3, 4))
vector = torch.nn.Parameter(torch.randn(5))
config = dict(betas=(0.9, 0.95), eps=1e-8)
optimizer = torch.optim.AdamW(
    [
        {"params": [matrix], "weight_decay": 0.1},
        {"params": [vector], "weight_decay": 0.0},
    ],
    lr=1e-2,
    **config,
)


def flat(tensor):
    return tensor.detach().flatten().tolist()


steps = []
start = {"matrix": flat(matrix), "vector": flat(vector)}
for step in range(5):
    lr = 1e-2 / (step + 1)
    for group in optimizer.param_groups:
        group["lr"] = lr
    # Sizes from tiny to large, so that eps and the bias correction both show.
    matrix.grad = torch.randn(3, 4) * 10.0 ** (2 - 2 * step)
    vector.grad = torch.randn(5) * 10.0 ** (2 * step - 6)
    optimizer.step()
    steps.append(
        {
            "lr": lr,
            "grad": {"matrix": flat(matrix.grad), "vector": flat(vector.grad)},
            "after": {"matrix": flat(matrix), "vector": flat(vector)},
            "exp_avg": {
                "matrix": flat(optimizer.state[matrix]["exp_avg"]),
                "vector": flat(optimizer.state[vector]["exp_avg"]),
            },
            "exp_avg_sq": {
                "matrix": flat(optimizer.state[matrix]["exp_avg_sq"]),
                "vector": flat(optimizer.state[vector]["exp_avg_sq"]),
            },
        }
    )
print(json.dumps({"start": start, "steps": steps}, indent=1))
