"""What a user of PyTorch would pick instead: the same model, tokens and dtype.

Skipped where PyTorch, or the library that a row is of, is not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.chip.setting import Case, Figures, Part, Setting, SkippedError

ROUNDS = 5
LEARNING_RATE = 1e-3
TOKENS = (4096, 16384)


def adam(torch: Any, params: Any) -> Any:
    """All on the device."""
    return torch.optim.Adam(params, lr=LEARNING_RATE, fused=params[0].is_cuda)


def torchao_offload(torch: Any, params: Any) -> Any:
    """State in host memory, updated there; gradients go there."""
    module = _imported("torchao.prototype.low_bit_optim", "torchao.optim")
    return module.CPUOffloadOptimizer(
        params, torch.optim.Adam, offload_gradients=False, lr=LEARNING_RATE, fused=True
    )


def torchao_8bit(torch: Any, params: Any) -> Any:
    """Moments in 8 bits, on the device."""
    del torch
    module = _imported("torchao.optim", "torchao.prototype.low_bit_optim")
    return module.Adam8bit(params, lr=LEARNING_RATE)


def bitsandbytes_8bit(torch: Any, params: Any) -> Any:
    """Moments in 8 bits, on the device."""
    del torch
    return _imported("bitsandbytes.optim").Adam8bit(params, lr=LEARNING_RATE)


def bitsandbytes_paged(torch: Any, params: Any) -> Any:
    """Moments in 8 bits in unified memory, which the driver pages."""
    del torch
    return _imported("bitsandbytes.optim").PagedAdam8bit(params, lr=LEARNING_RATE)


OPTIMIZERS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "PyTorch Adam": ("torch", adam),
    "torchao CPUOffloadOptimizer": ("torchao", torchao_offload),
    "torchao Adam8bit": ("torchao", torchao_8bit),
    "bitsandbytes Adam8bit": ("bitsandbytes", bitsandbytes_8bit),
    "bitsandbytes PagedAdam8bit": ("bitsandbytes", bitsandbytes_paged),
}
ZERO = "DeepSpeed ZeRO-Offload"


def _imported(*names: str) -> Any:
    """The first of some modules that is there: they moved between versions."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise SkippedError(f"{names[0]} cannot be imported")


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
    library = "deepspeed" if name == ZERO else OPTIMIZERS[name][0]
    for needed in ("torch", library):
        if importlib.util.find_spec(needed) is None:
            raise SkippedError(f"{needed} is not installed")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available() and not setting.dry:
        raise SkippedError("this PyTorch sees no GPU")
    # As JAX computes float32 by default on a GPU.
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (3, 64, 256, 128) if setting.dry else (24, 2048, 5632, 16384)
    model = gated(torch, *sizes).to(device)
    batch = torch.arange(tokens, device=device) * 31 % 128
    step = (zero_step if name == ZERO else plain_step)(torch, model, name)
    seconds = []
    for _ in range(ROUNDS + 2):
        began = time.perf_counter()
        step(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[2:])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "seconds": median,
        "tokens_per_second": tokens / median,
        "parameters": sum(p.numel() for p in model.parameters()),
        "measured_bytes": peak,
    }


def plain_step(torch: Any, model: Any, name: str) -> Callable[[Any], None]:
    """Gradients, then an update."""
    optimizer = OPTIMIZERS[name][1](torch, list(model.parameters()))

    def step(batch: Any) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero_step(torch: Any, model: Any, name: str) -> Callable[[Any], None]:
    """Of ZeRO stage 2 on one GPU: state in host memory, updated by its processor."""
    del torch, name
    deepspeed: Any = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
        },
    )

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


OTHERS = Part("others", minutes=4, case_seconds=90, cases=cases, each_alone=True)
