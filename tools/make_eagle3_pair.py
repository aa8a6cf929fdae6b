"""A tiny Llama and an EAGLE-3 head that drafts for it, both trained here, for `tests/fixtures/eagle3_pair`.

The language has structure at several ranges: words within which every symbol is sure, choices of unequal chances
between words, a topic named by the first symbol that changes the choices, and phrases copied from further back. So the
target is mostly but not always sure, and the head right at some steps and wrong at others.

  target/       `config.json` and `model.safetensors` of a Llama, as `save_pretrained` of transformers writes them
  head/         those of its head, as that of speculators writes them, without the embedding: it is the target's
  prompts.json  `prompts`, `greedy` continuations of 48 tokens by the target, and `accepted_lengths` of each round that
                drafts a chain of 4 (the drafts that hold and the target's next token; the last is cut at 48 tokens,
                and the first token, of the prefill, belongs to no round), all by recomputing everything, without a
                cache; and the least difference of the two largest logits that decided any of it

Weights are rounded to bfloat16 before anything is measured, and everything is computed in float32. Training again gives
the same only where sums are taken in the same order.

It runs in the environment of `tools/make_eagle3_fixtures.py`, for about two minutes:

  ref/bin/python tools/make_eagle3_pair.py
"""

import argparse
import json
import math
import pathlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from make_eagle3_fixtures import make_directory, save_model, step_by_hand
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM

OUTPUT = pathlib.Path(__file__).parents[1] / "tests" / "fixtures" / "eagle3_pair"
VOCAB, DRAFT_VOCAB = 256, 192
# The residual stream after so many layers; the last is what the final norm gets.
TAPS = (2, 3, 4)

TOPICS, WORDS, CHANCES = 4, 160, (0.6, 0.2, 0.12, 0.08)
LENGTH = 96

DOCUMENTS, TARGET_STEPS, TARGET_BATCH, TARGET_RATE = 6000, 400, 32, 4e-3
HEAD_STEPS, HEAD_BATCH, HEAD_RATE = 180, 4, 2e-3
# Texts of the target for every prompt length, half of them greedy.
TEXTS, TEXT_PROMPTS = 160, (2, 6, 14)
DRAFTS = 4

CONTINUATION = 48
PROMPT_LENGTHS = [3 + 37 * index // 15 for index in range(16)]
CANDIDATES = 100
# Well above what summing float32 in another order can change.
TARGET_MARGIN, DRAFT_MARGIN = 1e-2, 1e-3
# A continuation that goes round in a circle would be guessed too easily.
FEWEST_DISTINCT = 28

LAYER = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


class Language(NamedTuple):
    words: list[list[int]]
    # The words that may follow, by topic and word, the likeliest first.
    successors: list[list[list[int]]]


def make_language(chance: random.Random) -> Language:
    symbols = list(range(TOPICS, VOCAB))
    chance.shuffle(symbols)
    # Unequal, so that the head can do without the rarest of them.
    weights = [1 / (rank + 60) for rank in range(len(symbols))]
    words = [chance.choices(symbols, weights, k=chance.randint(2, 6)) for _ in range(WORDS)]
    common = [chance.sample(range(WORDS), len(CHANCES)) for _ in range(WORDS)]
    # A topic reorders what may follow half of the words.
    successors = [
        [chance.sample(row, len(row)) if topic and chance.random() < 0.5 else row for row in common]
        for topic in range(TOPICS)
    ]
    return Language(words, successors)


def write_document(language: Language, length: int, chance: random.Random) -> list[int]:
    topic = chance.randrange(TOPICS)
    written = [chance.randrange(WORDS)]
    symbols = [topic, *language.words[written[0]]]
    while len(symbols) < length:
        if len(written) > 4 and chance.random() < 0.08:
            phrase = chance.randint(2, 4)
            start = chance.randrange(len(written) - phrase)
            following = written[start : start + phrase]
        else:
            following = chance.choices(language.successors[topic][written[-1]], CHANCES)
        written += following
        symbols += [symbol for word in following for symbol in language.words[word]]
    return symbols[:length]


def optimize(parameters: list[torch.nn.Parameter], rate: float, steps: int, warmup: int = 20) -> Iterator[None]:
    """One step after each turn of the loop, which has to leave gradients behind."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
    )
    for _ in range(steps):
        optimizer.zero_grad()
        yield
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def round_weights(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def train_target(language: Language, chance: random.Random) -> LlamaForCausalLM:
    config = LlamaConfig(
        **LAYER,
        num_hidden_layers=4,
        max_position_embeddings=512,
        rope_parameters=dict(rope_type="default", rope_theta=1e5),
        tie_word_embeddings=True,
    )
    target = LlamaForCausalLM._from_config(config).float()
    documents = torch.tensor([write_document(language, LENGTH, chance) for _ in range(DOCUMENTS)])
    for _ in optimize(list(target.parameters()), TARGET_RATE, TARGET_STEPS):
        batch = documents[torch.randint(DOCUMENTS, (TARGET_BATCH,))]
        logits = target(batch, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
    print(f"target: cross entropy {loss:.3f}")
    round_weights(target)
    return target.eval()


@torch.no_grad()
def read_target(target: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and taps, f32[B, N, 3, H], by hooks: the last of transformers' hidden states is a normed one."""
    taps = []
    hooks = [
        target.model.layers[tap - 1].register_forward_hook(lambda _module, _args, output: taps.append(output))
        for tap in TAPS
    ]
    logits = target(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(taps, 2)


def write_texts(target: LlamaForCausalLM, language: Language, chance: random.Random) -> torch.Tensor:
    """What the target itself says: a head has to foresee the target, not the language."""
    texts = []
    for sample in (False, True):
        for length in TEXT_PROMPTS:
            prompts = torch.tensor([write_document(language, length, chance) for _ in range(TEXTS)])
            texts.append(
                target.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=LENGTH - length,
                    do_sample=sample,
                    pad_token_id=0,
                )
            )
    return torch.cat(texts)


def make_head(target: LlamaForCausalLM, texts: torch.Tensor) -> Eagle3DraftModel:
    """An untrained head, whose vocabulary are the most frequent tokens of `texts`."""
    layer = LlamaConfig(**LAYER, num_hidden_layers=1, rope_parameters=dict(rope_type="default", rope_theta=1e4))
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=list(TAPS),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFTS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    head = Eagle3DraftModel(config).float()
    counts = texts[:, 1:].flatten().bincount(minlength=VOCAB)
    ids = counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB].sort().values
    print(f"head: its vocabulary covers {counts[ids].sum() / counts.sum():.4f} of the texts")
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    head.load_vocab_mappings(known, ids - torch.arange(DRAFT_VOCAB))
    embedding = target.get_input_embeddings().weight
    with torch.no_grad():
        head.embed_tokens.weight.copy_(embedding)
        head.verifier_norm.weight.copy_(target.model.norm.weight)
        head.verifier_lm_head.weight.copy_(embedding[ids])
        head.lm_head.weight.copy_(embedding[ids]).requires_grad_()
    return head


def train_head(target: LlamaForCausalLM, texts: torch.Tensor) -> Eagle3DraftModel:
    """By the unrolled draft steps and the loss of speculators, which takes documents side by side in one row."""
    head = make_head(target, texts)
    _, taps = read_target(target, texts)
    rows = LENGTH - 1
    index = torch.arange(HEAD_BATCH * rows)[None]
    # The last draft steps of a document would be asked for the first tokens of the next one.
    counted = index % rows >= DRAFTS
    loss_config = resolve_loss_config("kl_div", "eager")
    for _ in optimize([weight for weight in head.parameters() if weight.requires_grad], HEAD_RATE, HEAD_STEPS):
        chosen = torch.randint(len(texts), (HEAD_BATCH,))
        _, loss, metrics = head(
            taps[chosen, :-1].reshape(1, HEAD_BATCH * rows, -1),
            texts[chosen, 1:].reshape(1, -1),
            index // rows,
            loss_mask=counted,
            position_ids=index % rows,
            verifier_last_hidden_states=taps[chosen, 1:, -1].reshape(1, HEAD_BATCH * rows, -1),
            ttt_steps=DRAFTS,
            loss_config=loss_config,
        )
        loss.backward()
    hits = (metrics[f"cond_acc_{step}_sum"] / metrics[f"cond_acc_{step}_total"] for step in range(DRAFTS))
    print(f"head: loss {loss:.3f}, right where the steps before were: {', '.join(f'{hit:.2f}' for hit in hits)}")
    round_weights(head)
    return head.eval()


def choose(logits: torch.Tensor, margins: list[float]) -> int:
    """The likeliest token, whose lead over the second joins `margins`."""
    values, indices = logits.topk(2)
    margins.append((values[0] - values[1]).item())
    return indices[0].item()


def draft_chain(
    weights: dict[str, torch.Tensor], tokens: list[int], taps: torch.Tensor, margins: list[float]
) -> list[int]:
    """What the head expects after `tokens`, all but the last of which have taps, f32[n - 1, 3, H]."""
    fed = taps.flatten(1) @ weights["fc.weight"].T
    drafts: list[int] = []
    for _ in range(DRAFTS):
        # Row p has the token after that of its taps.
        logits, recycled = step_by_hand(weights, torch.tensor(tokens[1:] + drafts), fed)
        token = choose(logits, margins)
        drafts.append(token + int(weights["d2t"][token]))
        fed = torch.cat([fed, recycled[None]])
    return drafts


class Run(NamedTuple):
    greedy: list[int]
    accepted_lengths: list[int]
    target_margin: float
    draft_margin: float


@torch.no_grad()
def speculate(target: LlamaForCausalLM, weights: dict[str, torch.Tensor], prompt: list[int]) -> Run:
    """Greedy decoding that drafts a chain a round, by reading everything anew for every token."""
    target_margins: list[float] = []
    draft_margins: list[float] = []

    def read(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits, taps = read_target(target, torch.tensor([tokens]))
        return logits[0, -1], taps[0]

    end = len(prompt) + CONTINUATION
    tokens = [*prompt, choose(read(prompt)[0], target_margins)]
    lengths = []
    while len(tokens) < end:
        start = len(tokens)
        drafts = draft_chain(weights, tokens, read(tokens[:-1])[1], draft_margins)
        # A draft beyond the last one, which never holds, lets the target's own token end every round.
        for draft in [*drafts, None]:
            tokens.append(choose(read(tokens)[0], target_margins))
            if tokens[-1] != draft or len(tokens) == end:
                break
        lengths.append(len(tokens) - start)
    return Run(tokens[len(prompt) :], lengths, min(target_margins), min(draft_margins))


def find_prompts(
    target: LlamaForCausalLM, weights: dict[str, torch.Tensor], language: Language, chance: random.Random
) -> list[tuple[list[int], Run]]:
    """The first document of each length whose continuation is varied and decided clearly."""
    found = []
    for length in PROMPT_LENGTHS:
        for _ in range(CANDIDATES):
            prompt = write_document(language, length, chance)
            run = speculate(target, weights, prompt)
            varied = len(set(run.greedy)) >= FEWEST_DISTINCT
            if varied and run.target_margin > TARGET_MARGIN and run.draft_margin > DRAFT_MARGIN:
                found.append((prompt, run))
                break
        else:
            raise RuntimeError(f"none of {CANDIDATES} prompts of length {length} will do: raise CANDIDATES")
    return found


def drop_embedding(path: pathlib.Path) -> None:
    tensors = load_file(path)
    del tensors["embed_tokens.weight"]
    save_file(tensors, path, {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chance = random.Random(0)
    language = make_language(chance)
    target = train_target(language, chance)
    head = train_head(target, write_texts(target, language, chance))
    found = find_prompts(target, head.state_dict(), language, chance)
    for prompt, run in found:
        print(f"prompt of {len(prompt):2}, {len(set(run.greedy)):2} distinct, accepted {run.accepted_lengths}")
    lengths = [length for _, run in found for length in run.accepted_lengths]
    margins = {name: min(getattr(run, name) for _, run in found) for name in ("target_margin", "draft_margin")}
    print(f"mean accepted length {sum(lengths) / len(lengths):.3f}, smallest margins {margins}")

    save_model(target, make_directory(output / "target"))
    save_model(head, make_directory(output / "head"))
    drop_embedding(output / "head" / "model.safetensors")
    measured = {name: [getattr(run, name) for _, run in found] for name in ("greedy", "accepted_lengths")}
    stored = {"prompts": [prompt for prompt, _ in found]} | measured | margins
    (output / "prompts.json").write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
