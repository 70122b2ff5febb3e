"""What the pair can do: answers of the target, acceptance of the draft, parity of the export.

    python corpora/make/measure.py --pair speccheck/engine/pair --answers ANSWERS.jsonl

Everything here is independent of the engine in speccheck: transformers generates from the
exported folders (greedy, free-running), and acceptance is simulated with the papers' rule on whole
sequences, without any cache. The answers file holds one object per prompt (id, answer, exact);
grading it needs speccheck and no torch: `--grade ANSWERS.jsonl`.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

CORPORA = Path(__file__).resolve().parents[1]


def prompts() -> dict[str, list[dict[str, Any]]]:
    """The committed corpora by family."""
    return {
        path.stem: [json.loads(line) for line in path.open(encoding="utf-8")]
        for path in sorted(CORPORA.glob("*.jsonl"))
    }


def measure(pair: Path, answers: Path, n_sampled: int) -> None:
    """Print a row per family and write the answers."""
    import torch
    from llama import Llama
    from make_pair import DRAFT, TARGET
    from safetensors.torch import load_file
    from tasks import corpus_items
    from transformers import AutoTokenizer, LlamaForCausalLM

    def ours(folder: Path, shape: Any) -> Llama:
        model = Llama(shape)
        state = load_file(str(folder / "model.safetensors"))
        model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
        return model

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(pair / "target", padding_side="left")
    theirs: Any = LlamaForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    target, draft = ours(pair / "target", TARGET), ours(pair / "draft", DRAFT)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def logits(model: Llama, ids: list[int], n_last: int) -> torch.Tensor:
        """Logits after each of the last so many tokens."""
        return model.head(model(torch.tensor([ids]))[0, -n_last:])

    def accepted_greedy(prompt: list[int], answer: list[int], k: int = 4) -> tuple[int, int]:
        """Follow the target's greedy answer; each round drafts k tokens after the text so far."""
        at, accepted, drafted = 0, 0, 0
        while at < len(answer):
            text = prompt + answer[:at]
            n = 0
            for _ in range(k):
                text = [*text, int(logits(draft, text, 1)[0].argmax())]
            drafted += k
            guesses = text[-k:]
            while n < k and at + n < len(answer) and guesses[n] == answer[at + n]:
                n += 1
            accepted += n
            at += n + 1
        return accepted, drafted

    def accepted_sampled(
        prompt: list[int], limit: int, k: int, *, one_hot: bool
    ) -> tuple[int, int]:
        """Rejection sampling at temperature 1 (Leviathan et al. 2023), until the end token."""
        text, accepted, drafted = prompt, 0, 0
        while len(text) < len(prompt) + limit:
            guesses: list[int] = []
            laws = []
            for _ in range(k):
                law = logits(draft, text + guesses, 1)[0].softmax(-1)
                if one_hot:
                    law = torch.nn.functional.one_hot(law.argmax(), len(law)).float()
                laws.append(law)
                guesses.append(int(torch.multinomial(law, 1)))
            truths = logits(target, text + guesses, k + 1).softmax(-1)
            drafted += k
            n = 0
            while n < k and torch.rand(()) * laws[n][guesses[n]] < truths[n][guesses[n]]:
                n += 1
                if guesses[n - 1] == end:
                    return accepted + n, drafted
            accepted += n
            left = (truths[n] - laws[n]).clamp(min=0) if n < k else truths[k]
            text = [*text, *guesses[:n], int(torch.multinomial(left, 1))]
            if text[-1] == end:
                break
        return accepted, drafted

    mismatches = 0
    with answers.open("w", encoding="utf-8") as file:
        print("task exact T0 T1_q T1_onehot tokens")
        for task, rows in prompts().items():
            references = corpus_items(task)
            batch = tokenizer.apply_chat_template(
                [row["messages"] for row in rows],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
                padding=True,
            )
            out = theirs.generate(
                **batch, max_new_tokens=rows[0]["max_tokens"], do_sample=False, pad_token_id=pad
            )
            counts: dict[str, int] = defaultdict(int)
            for i, (row, item) in enumerate(zip(rows, references, strict=True)):
                prompt = batch["input_ids"][i][batch["attention_mask"][i].bool()].tolist()
                answer = out[i, batch["input_ids"].shape[1] :].tolist()
                answer = answer[: answer.index(end) + 1] if end in answer else answer
                # Our own forward pass must agree with transformers at every token.
                again = logits(target, (prompt + answer)[:-1], len(answer)).argmax(-1).tolist()
                mismatches += again != answer
                text = tokenizer.decode(answer, skip_special_tokens=True)
                exact = text == item.answer
                counts["exact"] += exact
                counts["tokens"] += len(answer)
                record = {"id": row["id"], "exact": exact, "answer": text}
                file.write(json.dumps(record) + "\n")
                for name, value in zip(("a", "d"), accepted_greedy(prompt, answer), strict=True):
                    counts[name] += value
                if i < n_sampled:
                    for kind, one_hot in (("q", False), ("o", True)):
                        a, d = accepted_sampled(prompt, row["max_tokens"], 4, one_hot=one_hot)
                        counts[f"a{kind}"] += a
                        counts[f"d{kind}"] += d
            rates = [counts[f"a{x}"] / max(1, counts[f"d{x}"]) for x in ("", "q", "o")]
            n = len(rows)
            columns = [f"{counts['exact']}/{n}", *(f"{rate:.2f}" for rate in rates)]
            print(task, *columns, round(counts["tokens"] / n, 1), flush=True)
    print("prompts on which transformers and our forward pass differ:", mismatches)


def grade(answers: Path) -> None:
    """Print the checks passed per family, and each answer that failed."""
    from speccheck.grading import grade as grade_answer

    checks = {row["id"]: row["check"] for rows in prompts().values() for row in rows}
    passed: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for line in answers.open(encoding="utf-8"):
        row = json.loads(line)
        task = row["id"].rsplit("-", 1)[0]
        result = grade_answer(checks[row["id"]], row["answer"], code_execution="subprocess")
        total[task] += 1
        passed[task] += result.outcome == "pass"
        if result.outcome != "pass":
            print(row["id"], result.reason, "|", row["answer"].replace("\n", "\\n"))
    for task, n in total.items():
        print(f"{task}: {passed[task]}/{n} checks passed")


def main() -> None:
    """Measure with torch, or grade without it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path)
    parser.add_argument("--answers", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--sampled", type=int, default=6, help="prompts per family at T=1")
    parser.add_argument("--grade", type=Path)
    args = parser.parse_args()
    if args.grade:
        grade(args.grade)
    else:
        measure(args.pair, args.answers, args.sampled)


if __name__ == "__main__":
    main()
