"""What a user of PyTorch would pick instead: the same model, tokens and dtype.

Skipped where PyTorch, or the library that a row is of, is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.chip.setting import Case, Figures, Part, Setting, SkippedError

ROUNDS = 5
LEARNING_RATE = 1e-3
TOKENS = (4096, 16384)
# Where torchao has had its optimizers.
TORCHAO = ("torchao.optim", "torchao.prototype.low_bit_optim")
# Modules that may have a class, the class, and its options: Adam, with state updated in
# host memory, with moments in 8 bits, and with those in memory that the driver pages.
OPTIMIZERS: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "PyTorch Adam": (("torch.optim",), "Adam", {"fused": True}),
    "torchao CPUOffloadOptimizer": (
        TORCHAO,
        "CPUOffloadOptimizer",
        {"offload_gradients": False, "fused": True},
    ),
    "torchao Adam8bit": (TORCHAO, "Adam8bit", {}),
    "bitsandbytes Adam8bit": (("bitsandbytes.optim",), "Adam8bit", {}),
    "bitsandbytes PagedAdam8bit": (("bitsandbytes.optim",), "PagedAdam8bit", {}),
}
ZERO = "DeepSpeed ZeRO-Offload"
# Of stage 2 on one GPU: state in host memory, updated by its processor.
ZERO_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


def found(modules: Sequence[str], name: str) -> Any:
    """What the first of some modules has under a name."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise SkippedError(f"{modules[0]}.{name} cannot be imported")


def cases(setting: Setting) -> Mapping[str, Case]:
    """One for each optimizer and number of tokens."""
    sizes = (32,) if setting.dry else TOKENS
    names = ["PyTorch Adam"] if setting.dry else [*OPTIMIZERS, ZERO]
    return {
        f"{tokens} tokens/{name}": functools.partial(measure, setting, name, tokens)
        for tokens in sizes
        for name in names
    }


def measure(setting: Setting, name: str, tokens: int) -> Figures:
    """Steps of the model of the part `time`, and the peak of the device."""
    if importlib.util.find_spec("torch") is None:
        raise SkippedError("torch is not installed")
    torch = importlib.import_module("torch")
    cuda = torch.cuda if torch.cuda.is_available() else None
    if cuda is None and not setting.dry:
        raise SkippedError("this PyTorch sees no GPU")
    # As JAX computes float32 by default on a GPU.
    torch.set_float32_matmul_precision("high")
    device = "cpu" if cuda is None else "cuda"
    sizes = (3, 64, 256, 128) if setting.dry else (24, 2048, 5632, 16384)
    model = gated(torch, *sizes).to(device)
    batch = torch.arange(tokens, device=device) * 31 % 128
    step = (zero_step if name == ZERO else plain_step)(torch, model, name)
    seconds = []
    for _ in range(ROUNDS + 2):
        began = time.perf_counter()
        step(batch)
        if cuda:
            cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[2:])
    return {
        "seconds": median,
        "tokens_per_second": tokens / median,
        "parameters": sum(p.numel() for p in model.parameters()),
        "measured_bytes": cuda.max_memory_allocated() if cuda else None,
    }


def plain_step(torch: Any, model: Any, name: str) -> Callable[[Any], None]:
    """Gradients, then an update."""
    modules, of_class, options = OPTIMIZERS[name]
    params = list(model.parameters())
    if of_class == "CPUOffloadOptimizer":
        options = options | {"optimizer_class": torch.optim.Adam}
    elif not params[0].is_cuda:
        options = {}
    make = found(modules, of_class)
    optimizer = make(params, lr=LEARNING_RATE, **options)

    def step(batch: Any) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero_step(_: Any, model: Any, __: str) -> Callable[[Any], None]:
    """Gradients and an update by DeepSpeed."""
    params = list(model.parameters())
    make = found(["deepspeed"], "initialize")
    engine, *_ = make(model=model, model_parameters=params, config=ZERO_CONFIG)

    def step(batch: Any) -> None:
        engine.backward(engine(batch))
        engine.step()

    return step


def gated(torch: Any, layers: int, width: int, inner: int, vocabulary: int) -> Any:
    """The model of `workloads.gated`, each layer rematerialized."""
    nn, functional = torch.nn, torch.nn.functional
    from torch.utils.checkpoint import checkpoint  # pyright: ignore

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Parameter(torch.ones(width))
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.gate = nn.Linear(width, inner, bias=False)
            self.up = nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x * self.norm).chunk(3, -1)
            x = x + self.out(torch.sigmoid(q * k) * v)
            return x + self.down(functional.silu(self.gate(x)) * self.up(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return ((x @ self.embedding.weight.T) ** 2).mean()

    return Model()


PART = Part("others", minutes=4, case_seconds=90, cases=cases, each_alone=True)
