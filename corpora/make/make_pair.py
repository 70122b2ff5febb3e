"""Make the shipped model pair from nothing: tokenizer, target, draft distilled from it, export.

    python corpora/make/make_pair.py --minutes 30 --draft-minutes 12 --work WORK --out PAIR

Training follows the wall clock by default: the learning rate falls with the share of the time that
is used up, so that a run on a busy machine still ends on time and still ends with its decay, which
is where most of the exactness comes from. Such a run cannot be repeated bit for bit; what was done
for the committed weights is written in the README.md beside them. `--steps` and `--draft-steps`
count steps instead: with one process, the same seed then gives the same weights on the same
machine.

Two processes of one thread each share a batch (gloo): on two cores that is faster than two threads.
PyTorch is needed here only; the package reads the exported files with numpy and ONNX Runtime.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from llama import Llama, Shape, induce
from safetensors.torch import save_file
from tasks import TASKS, corpus_items, prompt_key
from tokenizers import Tokenizer
from tokens import ENTITIES, SPECIAL, make_tokenizer, render, write_tokenizer
from torch import Tensor
from torch.nn import functional

SEED = 20_260_601
TARGET = Shape(layers=6, width=256, heads=8, kv_heads=2, ff=704)
DRAFT = Shape(layers=1, width=96, heads=3, kv_heads=3, ff=256)
MAX_LENGTH = 4096
# Chats of each family among 100. Prose is learned from little: most of it is chance.
MIX = {
    "json": 20,
    "sql": 18,
    "code": 22,
    "support": 10,
    "rag": 14,
    "summary": 4,
    "multi_turn": 4,
    "tool_text": 5,
    "prose": 4,
}
PROSE_WEIGHT = 0.3
ENTITY_WEIGHT = 2.0


class Chats:
    """An endless stream of tokenised chats, each with the weight of every token in the loss."""

    def __init__(self, tokenizer: Tokenizer, seed: int, held_out: frozenset[str]) -> None:
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        self.held_out = held_out
        self.names = list(MIX)
        self.shares = np.cumsum([MIX[name] for name in self.names]) / sum(MIX.values())
        ids = (tokenizer.token_to_id(w) for e in ENTITIES for w in (e, f"Ġ{e}"))
        numbers = (tokenizer.token_to_id(f"{n:02d}") for n in range(100))
        self.entities = {i for i in [*ids, *numbers] if i is not None}

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are written out."""
        return list(self.tokenizer.encode(text).ids)

    def draw(self) -> tuple[list[int], list[float]]:
        """Ids of one chat, and the weight of each as a thing to predict."""
        while True:
            task = self.names[int(np.searchsorted(self.shares, self.rng.random()))]
            item = TASKS[task](self.rng)
            if prompt_key(item) not in self.held_out:
                break
        ids, weights = self.encode("<|bos|>"), [0.0]
        base = PROSE_WEIGHT if task == "prose" else 1.0
        for role, text in render([*item.messages, {"role": "assistant", "content": item.answer}]):
            piece = self.encode(text)
            ids += piece
            if role == "assistant":
                # The role mark itself is given, never predicted.
                weights.append(0.0)
                weights += [
                    base * (ENTITY_WEIGHT if i in self.entities else 1.0) for i in piece[1:]
                ]
            else:
                weights += [0.0] * len(piece)
        return ids, weights

    def step(
        self, n_chats: int, rank: int, world: int, n_micro: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One rank's share of a step, as padded micro-batches of chats of similar length.

        Every rank draws all chats of the step and keeps every world-th of the sorted ones, so that
        ranks get equal work and each step holds the whole mixture.
        """
        chats = sorted((self.draw() for _ in range(n_chats)), key=lambda chat: len(chat[0]))
        mine = chats[rank::world]
        size = -(-len(mine) // n_micro)
        for start in range(0, len(mine), size):
            group = mine[start : start + size]
            length = max(len(ids) for ids, _ in group)
            ids = torch.full((len(group), length), 2, dtype=torch.long)
            weights = torch.zeros(len(group), length)
            for row, (chat_ids, chat_weights) in enumerate(group):
                ids[row, : len(chat_ids)] = torch.tensor(chat_ids)
                weights[row, : len(chat_ids)] = torch.tensor(chat_weights)
            yield ids, weights


class Muon:
    """Momentum orthogonalised by Newton-Schulz steps (Jordan et al. 2024) for matrices, in float32
    since bfloat16 is emulated on these processors, with AdamW for embeddings and norms. Each rank
    orthogonalises its share of the matrices.
    """

    def __init__(self, model: Llama, rank: int, world: int, lr: float = 0.02) -> None:
        named = list(model.named_parameters())
        self.matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in named if p.dim() != 2 or "embed" in n]
        self.adam = torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.rank, self.world, self.lr = rank, world, lr

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update all parameters from their gradients; `scale` multiplies both rates."""
        for group in self.adam.param_groups:
            group["lr"] = 4e-3 * scale
        self.adam.step()
        updates = []
        for i, (p, momentum) in enumerate(zip(self.matrices, self.momenta, strict=True)):
            gradient = p.grad if p.grad is not None else torch.zeros_like(p)
            momentum.lerp_(gradient, 0.05)
            if i % self.world == self.rank:
                updates.append(orthogonalise(gradient.lerp(momentum, 0.95)))
            else:
                updates.append(torch.zeros_like(p))
        flat = torch.cat([u.flatten() for u in updates])
        if self.world > 1:
            dist.all_reduce(flat)
        start = 0
        for p in self.matrices:
            update = flat[start : start + p.numel()].view_as(p)
            p.add_(update, alpha=-self.lr * scale * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
            start += p.numel()


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly: singular values end between 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(4):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x
    return x.mT if tall else x  # type: ignore[no-any-return]


def decay(fraction: float, hold: float) -> float:
    """Full rate for the share `hold` of the run, then linearly down to 2 %."""
    return 1.0 if fraction < hold else max(0.02, 1 - 0.98 * (fraction - hold) / (1 - hold))


def average_gradients(model: Llama, world: int) -> None:
    """One all-reduce over all gradients at once."""
    if world == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient) / world)
        start += gradient.numel()


def train(rank: int, args: argparse.Namespace, world: int, kind: str, minutes: float) -> None:
    """Train the target on the chats, or the draft on the target's distribution over them."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = args.work / f"meet-{kind}-{os.getppid()}"
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting.resolve()}", rank=rank, world_size=world
        )
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    chats = Chats(tokenizer, SEED + (1 if kind == "target" else 2), held_out_prompts())
    model = Llama(TARGET if kind == "target" else DRAFT)
    generator = torch.Generator().manual_seed(SEED)
    induce(model, twins(tokenizer), generator)
    if args.resume and kind == "target":
        model.load_state_dict(torch.load(args.work / "target.pt"))
    teacher = load_target(args.work) if kind == "draft" else None
    optimizer = Muon(model, rank, world, lr=args.lr)
    n_steps = args.steps if kind == "target" else args.draft_steps
    cache: list[tuple[Tensor, Tensor, Tensor]] = []
    started = saved = time.monotonic()
    tokens = step = 0
    recent = 0.0
    while True:
        used = step / n_steps if n_steps else (time.monotonic() - started) / (60 * minutes)
        if world > 1:  # rank 0's clock decides for all, so that all stop at the same step
            shared = torch.tensor([used])
            dist.broadcast(shared, 0)
            used = float(shared)
        if used >= 1:
            break
        if teacher is not None and step % 4 and len(cache) > 40:
            picks = np.random.default_rng([SEED, step, rank]).integers(len(cache), size=args.micro)
            batches = [cache[int(i)] for i in picks]
        else:
            batches = []
            for ids, weights in chats.step(args.chats, rank, world, args.micro):
                tokens += int((ids != 2).sum()) * world
                hidden = ids if teacher is None else teach(teacher, ids, weights)
                batches.append((ids, weights, hidden))
            if teacher is not None and len(cache) < 4000:
                cache += batches
        total = 0.0
        model.zero_grad(set_to_none=True)
        norm = sum(float(weights[:, 1:].sum()) for _, weights, _ in batches)
        for ids, weights, hidden in batches:
            wanted = weights[:, 1:] > 0
            logits = model.head(model(ids[:, :-1])[wanted])
            if teacher is None:
                losses = functional.cross_entropy(logits, ids[:, 1:][wanted], reduction="none")
            else:
                truth = functional.log_softmax(teacher.head(hidden.float()), -1)
                losses = (truth.exp() * (truth - functional.log_softmax(logits, -1))).sum(-1)
            loss = (losses * weights[:, 1:][wanted]).sum() / norm
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        average_gradients(model, world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(args.rate * min(1.0, (step + 1) / 20) * decay(used, args.hold))
        step += 1
        recent = total if step == 1 else 0.95 * recent + 0.05 * total
        if rank == 0 and (step % 20 == 0 or step == 1):
            clock = time.monotonic() - started
            print(f"{kind} {clock:6.0f}s step {step} loss {recent:.4f} tokens {tokens}", flush=True)
        if rank == 0 and time.monotonic() - saved > 90:
            saved = time.monotonic()
            torch.save(model.state_dict(), args.work / f"{kind}.pt")
    if rank == 0:
        torch.save(model.state_dict(), args.work / f"{kind}.pt")
        facts = {"steps": step, "tokens": tokens, "loss": recent, "minutes": minutes}
        (args.work / f"{kind}.json").write_text(json.dumps(facts))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


@torch.no_grad()
def teach(teacher: Llama, ids: Tensor, weights: Tensor) -> Tensor:
    """The target's last hidden states where the loss is taken: small enough to keep in memory, and
    one product away from its logits.
    """
    return teacher(ids[:, :-1])[weights[:, 1:] > 0].half()  # type: ignore[no-any-return]


def load_target(work: Path) -> Llama:
    """The trained target, to learn from."""
    model = Llama(TARGET)
    model.load_state_dict(torch.load(work / "target.pt"))
    return model.eval()


def twins(tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Ids of each word that is in the vocabulary both with and without a space before it."""
    vocabulary = tokenizer.get_vocab()
    return [(i, vocabulary[f"Ġ{w}"]) for w, i in vocabulary.items() if f"Ġ{w}" in vocabulary]


def held_out_prompts() -> frozenset[str]:
    """The committed prompts: never trained on, whatever the seed says."""
    return frozenset(prompt_key(item) for task in TASKS for item in corpus_items(task))


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers and vLLM load as a LlamaForCausalLM."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    bos, end, pad = (tokenizer.token_to_id(token) for token in SPECIAL[:3])
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": bos,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": end, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    state = {f"model.{name}": t.half().contiguous() for name, t in model.state_dict().items()}
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(tokenizer, folder, MAX_LENGTH)


def main() -> None:
    """Make all of it, or one part that `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--draft-minutes", type=float, default=12)
    parser.add_argument("--steps", type=int, default=0, help="count steps, not minutes")
    parser.add_argument("--draft-steps", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--chats", type=int, default=32, help="chats per step, all processes")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches per process and step")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's rate")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all rates")
    parser.add_argument("--hold", type=float, default=0.35, help="share of the run at full rate")
    parser.add_argument("--resume", action="store_true", help="go on from WORK/target.pt")
    parser.add_argument("--only", choices=("tokenizer", "target", "draft", "export"))
    parser.add_argument("--work", type=Path, required=True, help="checkpoints go here")
    parser.add_argument("--out", type=Path, required=True, help="target/ and draft/ go here")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.only in (None, "tokenizer"):
        make_tokenizer(SEED).save(str(args.work / "tokenizer.json"))
    for kind, minutes in (("target", args.minutes), ("draft", args.draft_minutes)):
        if args.only in (None, kind):
            mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
                train, (args, args.processes, kind, minutes), args.processes
            )
    if args.only in (None, "export"):
        tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
        for kind, shape in (("target", TARGET), ("draft", DRAFT)):
            model = Llama(shape)
            model.load_state_dict(torch.load(args.work / f"{kind}.pt"))
            export(model, tokenizer, args.out / kind)


if __name__ == "__main__":
    main()
