"""Trains the reference model and writes its two checkpoints.

    python tools/train/train.py --out src/iop/engine/checkpoints

Needs PyTorch, numpy and safetensors in an environment of their own; the engine needs none but the latter two. One run
gives both checkpoints: `first` is taken on the way, `second` at the end, so they are one model at two ages. The result
depends on the seed and, through floating point, on the machine; the checkpoints in the repository are the reference.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Final

import bpe
import corpus
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as f

from iop.engine.tokenizer import FORMAT, Tokenizer

SPECIALS: Final = (
    corpus.BOS,
    corpus.END,
    corpus.SYSTEM,
    corpus.USER,
    corpus.ASSISTANT,
    "<|tool|>",
    "<|pad|>",
    "<|reserved|>",
)
VOCABULARY: Final = 1024
WIDTH: Final = 128
LAYERS: Final = 4
HEADS: Final = 4
FFN: Final = 384
WINDOW: Final = 256
CONTEXT: Final = 2048
ROPE_BASE: Final = 10000.0
EPSILON: Final = 1e-5


class Block(nn.Module):
    """One layer: attention with rotary positions, then a gated feed-forward; both pre-normed."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.attn = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q", "k", "v", "o")}
        )
        self.mlp = nn.ModuleDict(
            {
                "gate": nn.Linear(WIDTH, FFN, bias=False),
                "up": nn.Linear(WIDTH, FFN, bias=False),
                "down": nn.Linear(FFN, WIDTH, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (B, T, WIDTH)."""
        rows, length, _ = x.shape
        h = self.attn_norm(x)
        q, k, v = (self.attn[name](h).view(rows, length, HEADS, -1).transpose(1, 2) for name in "qkv")
        mixed = f.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.attn["o"](mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        h = self.mlp_norm(x)
        return x + self.mlp["down"](f.silu(self.mlp["gate"](h)) * self.mlp["up"](h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves paired: (B, H, T, D) with tables (T, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Model(nn.Module):
    """The decoder; the output layer is the embedding's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        # Wide apart from the start: words of one kind (all the animals) would else fall together before the model has
        # learned to copy, and then it could never tell which of them to copy.
        nn.init.normal_(self.embed.weight, std=0.3)
        nn.init.constant_(self.norm.weight, 0.2)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                nn.init.normal_(
                    weight,
                    std=(0.5 if name.endswith(("o.weight", "down.weight")) else 1.0)
                    / math.sqrt(weight.shape[1]),
                )
        half = WIDTH // HEADS // 2
        angle = torch.outer(torch.arange(WINDOW).double(), ROPE_BASE ** (-torch.arange(half).double() / half))
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, T, VOCABULARY) of ids (B, T), T <= WINDOW."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return self.norm(x) @ self.embed.weight.T


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal; learns matrices in fewer steps than Adam."""

    def __init__(self, weights: list[Tensor], lr: float) -> None:
        super().__init__(weights, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update from the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(weight)
                state["buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(state["buffer"], group["momentum"]))
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - group["lr"] * 0.02).add_(update, alpha=-group["lr"] * scale)


def orthogonal(g: Tensor) -> Tensor:
    """About the nearest orthogonal matrix, by five Newton-Schulz steps."""
    tall = g.shape[0] > g.shape[1]
    x = (g.T if tall else g) / (g.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


class Batches:
    """Endless fresh text: crops of a packed stream; half of them begin at a document's start."""

    def __init__(self, tokenizer: Tokenizer, seed: int, documents: int) -> None:
        self._random = random.Random(seed)
        stream: list[int] = []
        self._starts: list[int] = []
        for _ in range(documents):
            self._starts.append(len(stream))
            stream.extend(tokenizer.encode(corpus.document(self._random), special=True))
        self._stream = torch.tensor(stream)

    def __len__(self) -> int:
        return len(self._stream)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (rows, WINDOW)."""
        limit = len(self._stream) - WINDOW - 1
        at = [
            min(self._random.choice(self._starts), limit) if row % 2 else self._random.randrange(limit)
            for row in range(rows)
        ]
        crops = torch.stack([self._stream[i : i + WINDOW + 1] for i in at])
        return crops[:, :-1], crops[:, 1:]


def loss_of(model: Model, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood per token, in nats."""
    return f.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def save(
    model: Model, out: Path, name: str, merges: list[tuple[int, int]], *, tokens: int, held_out: float
) -> None:
    """Write one checkpoint directory."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.detach().half().contiguous() for k, v in model.named_parameters()},
        folder / "model.safetensors",
        {"format": "iop"},
    )
    config = {
        "format": "iop-transformer-1",
        "weight_version": name,
        "vocabulary": VOCABULARY,
        "width": WIDTH,
        "layers": LAYERS,
        "heads": HEADS,
        "ffn_width": FFN,
        "window_tokens": WINDOW,
        "context_tokens": CONTEXT,
        "rope_base": ROPE_BASE,
        "norm_epsilon": EPSILON,
        "training": {"tokens_seen": tokens, "held_out_loss_nats": round(held_out, 4)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = {"format": FORMAT, "specials": SPECIALS, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, separators=(",", ":")) + "\n")


def main() -> None:
    """Train for a given time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--first-at", type=float, default=0.08, help="share of the time after which `first` is taken"
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    sample = [corpus.document(random.Random(seed)) for seed in range(4000)]
    plain = [part for text in sample for part in text.replace("<|", "|>").split("|>")]
    merges = bpe.train_merges(plain, specials=len(SPECIALS), vocabulary=VOCABULARY)
    tokenizer = Tokenizer(specials=SPECIALS, merges=merges)
    train, held_out = Batches(tokenizer, options.seed, 30_000), Batches(tokenizer, options.seed + 1, 400)
    fixed = held_out.draw(32)
    model = Model()
    matrices = [w for n, w in model.named_parameters() if w.ndim == 2 and "embed" not in n]
    others = [w for n, w in model.named_parameters() if not (w.ndim == 2 and "embed" not in n)]
    adam = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    muon = Muon(matrices, lr=0.02)
    print(
        f"{sum(w.numel() for w in model.parameters())} parameters, {len(train)} tokens, {len(merges)} merges",
        flush=True,
    )
    start, step, taken = time.process_time(), 0, False
    while (done := (time.process_time() - start) / (60 * options.minutes)) < 1:
        factor = min(1.0, (step + 1) / 20) * min(1.0, (1 - done) / 0.6)
        adam.param_groups[0]["lr"], muon.param_groups[0]["lr"] = 1e-3 * factor, 0.02 * factor
        loss = loss_of(model, *train.draw(options.rows))
        adam.zero_grad()
        muon.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        adam.step()
        muon.step()
        step += 1
        if step % 20 == 0:
            print(f"step {step} done {done:.2f} loss {loss.item():.3f}", flush=True)
        if not taken and done >= options.first_at:
            taken = True
            report(model, options.out, "first", merges, fixed, step * options.rows * WINDOW)
    report(model, options.out, "second", merges, fixed, step * options.rows * WINDOW)


def report(
    model: Model,
    out: Path,
    name: str,
    merges: list[tuple[int, int]],
    fixed: tuple[Tensor, Tensor],
    tokens: int,
) -> None:
    """Measure on text never trained on, save, and say so."""
    with torch.no_grad():
        held_out = loss_of(model, *fixed).item()
    save(model, out, name, merges, tokens=tokens, held_out=held_out)
    print(f"saved {name}: {tokens} tokens seen, held-out loss {held_out:.4f}", flush=True)


if __name__ == "__main__":
    main()
