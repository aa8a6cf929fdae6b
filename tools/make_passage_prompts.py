"""Prompts that hold long passages, for `data.prompts` of a training configuration: a head learns little of summaries
and of answers from documents where all prompts are short.

  python tools/make_passage_prompts.py --texts moby_dick.txt wikitext.txt --summaries 7000 \\
      --questions prompts.jsonl --german german.txt --avoid spec_bench/question.jsonl --output passages.jsonl

Summaries are of stretches of the texts; each short question is asked of the paragraphs that share most of its words;
each line of German is to be translated. A prompt that shares a run of twelve words with a question of the files to
avoid is left out, so that what a draft is measured by is not what it has learned.
"""

import argparse
import json
import math
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxspec.checkpoint.json_file import read_json_lines
from jaxspec.errors import UserError
from jaxspec.evaluate.questions import read_questions

SUMMARIES = [
    "Summarize: {}",
    "Summarize the following text.\n\n{}",
    "Summarise this passage in two or three sentences:\n\n{}",
    "{}\n\nTL;DR",
    "{}\n\nWhat are the main points of this text?",
    "Write a short summary of the article below.\n\n{}",
]
WITH_DOCUMENTS = [
    "{documents}\n{question}",
    "{documents}\n\nQuestion: {question}",
    "Context: {documents}\n\n{question}",
]
TRANSLATION = "Translate German to English: {}"
# Characters of a passage: about 180 to 1,700 tokens. A paragraph to answer from has 300 at least.
SHORTEST, LONGEST, PARAGRAPH = 700, 6500, 300
RUN = 12
HELDOUT_EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--texts", nargs="+", type=Path, required=True, help="plain texts, paragraphs between blank lines"
    )
    parser.add_argument("--summaries", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--questions", type=Path, help="JSONL of prompts; those of one short question are asked")
    parser.add_argument("--german", type=Path, help="sentences, one a line")
    parser.add_argument(
        "--avoid", nargs="+", type=Path, default=[], help="JSONL of questions that are kept for measuring"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        write(options)
    except UserError as error:
        sys.exit(f"make_passage_prompts: {error}")


def write(options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    texts = {path.stem: paragraphs(read(path)) for path in options.texts}
    made = list(summaries(texts, options.summaries, rng))
    if options.questions:
        made += questions_with_documents(texts, options.questions, rng)
    if options.german:
        lines = read(options.german).splitlines()
        made += [("translation", TRANSLATION.format(line)) for line in lines if line.strip()]
    kept_for_measuring = {
        run
        for path in options.avoid
        for question in read_questions(path)
        for turn in question.turns
        for run in runs(turn)
    }
    clean = [(source, prompt) for source, prompt in made if kept_for_measuring.isdisjoint(runs(prompt))]
    rng.shuffle(clean)
    with options.output.open("w", encoding="utf-8") as file:
        for index, (source, prompt) in enumerate(clean):
            split = "train" if index % HELDOUT_EVERY else "heldout"
            file.write(
                json.dumps({"id": f"passage-{index}", "split": split, "source": source, "prompt": prompt}) + "\n"
            )
    print(f"{len(clean)} prompts, {len(made) - len(clean)} left out:", dict(Counter(source for source, _ in clean)))


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a text file in UTF-8") from error


def paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", untokenised(text)) if part.strip()]


def untokenised(text: str) -> str:
    """Undoes what WikiText did to its texts: unknown words, split numbers, spaces around punctuation, line breaks."""
    if "<unk>" not in text:
        return text
    text = re.sub(r" @(.)@ ", r"\1", text.replace("<unk> ", ""))
    text = re.sub(r" ([,.;:?!)%]|'s\b)", r"\1", re.sub(r"\( ", "(", text))
    return text.replace("\n", "\n\n")


def summaries(texts: dict[str, list[str]], count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Stretches of whole paragraphs, of lengths even on a logarithmic scale; texts by the roots of their sizes."""
    sizes = [math.sqrt(sum(map(len, parts))) for parts in texts.values()]
    for _ in range(count):
        (name,) = rng.choices(list(texts), sizes)
        length = math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))
        start = rng.randrange(len(texts[name]))
        passage = " ".join(_until(texts[name][start:], length))[:LONGEST]
        if len(passage) >= SHORTEST:
            yield name, rng.choice(SUMMARIES).format(passage)


def questions_with_documents(texts: dict[str, list[str]], path: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Short questions, each below the paragraphs that say most of its rare words."""
    documents = [part for parts in texts.values() for part in parts if PARAGRAPH <= len(part) <= LONGEST]
    where = defaultdict(list)
    for index, document in enumerate(documents):
        for word in set(words(document)):
            where[word].append(index)
    for _, row in read_json_lines(path):
        question = row.get("prompt", "")
        if not (question.endswith("?") and "\n" not in question and len(question) < 120):
            continue
        score: dict[int, float] = defaultdict(float)
        for word in set(words(question)):
            for index in where[word]:
                score[index] += math.log(len(documents) / len(where[word]))
        found = [documents[index] for index in sorted(score, key=score.__getitem__, reverse=True)[:12]]
        said = "\n".join(_until(found, rng.uniform(1200, 3400)))[:LONGEST]
        yield "documents", rng.choice(WITH_DOCUMENTS).format(documents=said, question=question)


def runs(text: str) -> set[tuple[str, ...]]:
    said = words(text)
    return {tuple(said[at : at + RUN]) for at in range(len(said) - RUN + 1)}


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _until(parts: Iterable[str], length: float) -> Iterator[str]:
    """Parts until they have so many characters together."""
    total = 0
    for part in parts:
        if total >= length:
            return
        yield part
        total += len(part)


if __name__ == "__main__":
    main()
