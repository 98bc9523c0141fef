"""Names that a snippet takes for granted: those of the reader's own program, and of the snippets before it.

`test_names.py` sees to it that docs/index.md or the page says which.

`COMMON` runs before each snippet, `SETTINGS[name]` after it, and `AFTER[name]` behind the snippet, to see that it did
what the page says.
"""

COMMON = """
import contextlib, json
import numpy as np, torch
import mpidl

torch.manual_seed(0)

class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.linear(x).relu())
"""

BATCH = """
comm = mpidl.init()
x, y = torch.randn(4, 8), torch.randint(4, (4,))
"""
ZERO = BATCH + "model = MyModel()\noptimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=1e-3)\n"
TRAINED = ZERO + "model(x).sum().backward()\noptimizer.step()\noptimizer.zero_grad()\n"
DATASET = "dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))\n"
KEPT = """
step, sampler = 7, mpidl.data.DistributedSampler(range(64), seed=0)
loader = mpidl.data.DataLoader(range(64), batch_size=8, shuffle=True)
scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 10), mpidl.GradScaler(enabled=False)
"""
TINY_GPT2 = """
from mpidl.models.gpt2 import GPT2, GPT2Config
config = GPT2Config(vocab_size=64, block_size=16, layers=2, heads=2, embd=16)
"""
TOKENS = """
tokens = torch.randint(64, (32, 17))
dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
x, y = dataset[:2]
"""
TRANSFORMERS = """
import transformers
comm = mpidl.init()
config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_layer=1, n_head=1, n_embd=8)
model = transformers.GPT2LMHeadModel(config)
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(16, (64, 8))]
args = {"output_dir": f"out/rank{comm.rank}", "max_steps": 2, "save_strategy": "no", "report_to": "none"}
args = transformers.TrainingArguments(**args)
"""
TRAIN_ONE_STEP = """
start, steps, folder = 0, 2, "ckpt"
def train_one_step():
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SETTINGS = {
    "activations-1": BATCH
    + "model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), 4, enable_nested_tensor=False)\n",
    "activations-2": TINY_GPT2 + "from mpidl.activations import CheckpointStore, checkpoint_modules\n",
    "checkpoint-1": TRAINED + KEPT,
    "checkpoint-2": TRAINED + KEPT + TRAIN_ONE_STEP + 'import sys\nsys.argv = ["train.py", "--steps", "2"]\n',
    "checkpoint-3": BATCH
    + TINY_GPT2
    + "model = GPT2(config)\noptimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3)\n"
    + 'mpidl.checkpoint.save("ckpt", model, optimizer)\n',
    "collectives-2": BATCH + "n = 64\n",
    "ddp-1": DATASET,
    "ddp-2": BATCH
    + """
model = mpidl.DistributedDataParallel(MyModel())
micro_batches = [(torch.randn(2, 3, 8), torch.randint(4, (2, 3)), torch.ones(2, 3)) for _ in range(2)]
masks, last = [mask for _, _, mask in micro_batches], 1
""",
    "ddp-3": BATCH + "model = MyModel()\n",
    "ddp-4": BATCH,
    "faults-1": TRAINED + TRAIN_ONE_STEP,
    "faults-2": ZERO + "loss = model(x).square().mean()\n",
    "faults-3": ZERO,
    "frameworks-2": TRANSFORMERS,
    "frameworks-3": TRANSFORMERS + "optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3)\n",
    "frameworks-5": ZERO
    + "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    + "zero, (model, optimizer) = optimizer, accelerator.prepare(model, optimizer)\n",
    "gpu-1": BATCH + 'x, out, n = torch.ones(8, device="cuda"), torch.ones(8 * comm.size, device="cuda"), 64\n',
    "gpu-2": TINY_GPT2,
    "memory-1": BATCH + "model = MyModel()\n",
    "memory-2": BATCH
    + """
class Model(MyModel):
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(super().forward(x), y)
model = Model()
optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3)
""",
    "mesh-2": "x = torch.randn(4, 8)\n",
    "parallelism-1": TINY_GPT2 + TOKENS,
    "parallelism-2": TINY_GPT2 + TOKENS,
    "parallelism-3": TINY_GPT2,
    "parallelism-5": TINY_GPT2,
    "parallelism-6": TINY_GPT2,
    "parallelism-7": TINY_GPT2,
    "parallelism-8": TINY_GPT2 + "model = GPT2(config)\n",
    "parallelism-9": TINY_GPT2 + TOKENS,
    "training-1": """
def my_part_of_each_batch(rank, size):
    for _ in range(2):
        yield torch.randn(4, 8), torch.randint(4, (4,))
""",
    "training-2": BATCH + DATASET,
    "training-3": BATCH + "model = MyModel().half()\n",
    "training-4": BATCH + "model = MyModel()\n",
    "training-5": TRAINED + KEPT,
    "training-6": BATCH,
    "training-7": BATCH,
    "training-8": BATCH,
    "training-9": BATCH,
    "zero-1": ZERO,
    "zero-2": BATCH + TINY_GPT2,
    "zero-3": BATCH + "model, precision = MyModel(), mpidl.Precision(torch.bfloat16, reduce_dtype=torch.float32)\n",
    "zero-4": BATCH + "model = MyModel()\n",
    "zero-5": ZERO,
}

AFTER = {
    "ddp-3": "model(x).sum().backward()\noptimizer.step()\n",
    "README-1": "assert mean < 0.2 and (set(weights) == set(model.state_dict())) == (comm.rank == 0)",
    "checkpoint-3": "assert weight.shape == (64, 16)",
    "checkpoint-4": "assert loaded.step == 10",
    "collectives-6": "assert round(ring.seconds(64 << 20), 4) == 0.0192",
    "frameworks-1": "assert transformers.GPT2LMHeadModel.from_pretrained('trained').config.n_embd == 64",
    "frameworks-2": "assert trainer.state.global_step == 2",
    "frameworks-3": "trainer.args.max_steps = 5\ntrainer.train(resume_from_checkpoint=True)\n"
    + "assert [entry['step'] for entry in trainer.state.log_history][-1] == 5",
    "frameworks-4": "assert loss < 1.6",
    "frameworks-6": "assert trainer.global_step == 2 * 512 // 64",
    "parallelism-1": "assert 0 < mean < 5",
    "parallelism-2": "assert saved.nbytes == 0 and config.layers * whole_block == 2 * 64 * 2 * 16 * 16",
    "parallelism-4": "assert model[0].up.weight.shape in ((128, 64), (127, 64))",
    "parallelism-5": "assert model.transformer['wte'].weight.shape == (32, 16) and not model.lm_head.weight.is_meta",
    "parallelism-6": "assert text.shape == (1, 6)",
    "parallelism-8": "assert found.tp == 2",
    "zero-1": "assert norm > 1 and whole.shape == (4, 8) and 0 < largest['head.bias'] <= 1",
    "zero-5": "assert (set(whole) == set(MyModel().state_dict())) == (comm.rank == 0)",
    "training-6": "for _ in range(50):\n    model(x).sum().backward()\n    optimizer.step()\n"
    + "assert optimizer.averager.steps == 50 and len(optimizer.outer.state) == len(list(model.parameters()))",
    "training-7": "for _ in range(104):\n    model(x).sum().backward()\n    optimizer.step()\n"
    + "assert averager.steps == 104",
    "training-8": "for _ in range(3):\n    model(x).sum().backward()\n    optimizer.step()\n"
    + "assert together.steps == optimizer.averager.steps == 3",
    "training-9": "model(x).sum().backward()\noptimizer.step()\nassert 'q' in optimizer.state[matrices[0]]",
    "training-1": "assert (set(whole) == set(MyModel().state_dict())) == (comm.rank == 0)",
}

NEEDS_A_GPU = ("gpu-1", "gpu-2")
