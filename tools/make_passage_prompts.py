"""Prompts that hold long passages, for `data.prompts` of a training configuration: a head learns little of summaries
and of answers from documents where all prompts are short.

  python tools/make_passage_prompts.py --texts moby_dick.txt wikitext.txt --summaries 7000 \\
      --questions prompts.jsonl --german german.txt --avoid spec_bench/question.jsonl --output passages.jsonl

Summaries are of stretches of the texts; each short question is asked of the paragraphs that share most of its words;
each line of German is to be translated. The last part of every text is for held-out prompts only, and the split of a
question is that of its file. A prompt is left out that shares a run of twelve words with a question of the files to
avoid, or whose own question ends one of these: what a draft is measured by is not what it has learned.
"""

import argparse
import dataclasses
import json
import math
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxspec.checkpoint.staging import whole_file
from jaxspec.errors import UserError
from jaxspec.evaluate.questions import Question, read_questions
from jaxspec.train.contamination import holds_measured, measured_by, words

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
SPLITS = {"train": 0.98, "heldout": 0.02}


@dataclasses.dataclass(frozen=True)
class Made:
    """Attributes:
    question: what a prompt asks, where that is not all of it.
    """

    split: str
    source: str
    prompt: str
    question: str = ""


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a number, at least 0")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--texts", nargs="+", type=Path, required=True, help="plain texts, paragraphs between blank lines"
    )
    parser.add_argument("--summaries", type=natural, default=1000, metavar="N", help="how many (default: %(default)s)")
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
    except (UserError, OSError) as error:
        sys.exit(f"make_passage_prompts: {error}")


def write(options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    whole = {str(path): paragraphs(read(path)) for path in options.texts}
    measured = measured_by(question for path in options.avoid for question in read_questions(path))
    questions = read_questions(options.questions) if options.questions else []
    lines = [line for line in read(options.german).splitlines() if line.strip()] if options.german else []
    made: list[Made] = []
    for split, share in SPLITS.items():
        texts = {name: of_split(split, parts) for name, parts in whole.items()}
        made += summaries(texts, round(options.summaries * share), split, rng)
        made += questions_with_documents(texts, questions, split, rng)
        made += [Made(split, "translation", TRANSLATION.format(line)) for line in of_split(split, lines)]
    clean = [each for each in made if not holds_measured(each.prompt, [each.question], measured)]
    if not clean:
        raise UserError("no prompt is left: give longer texts, or more of them")
    rng.shuffle(clean)
    with whole_file(options.output) as partial:
        partial.write_text(
            "".join(json.dumps({"id": f"passage-{i}", **row(each)}) + "\n" for i, each in enumerate(clean))
        )
    found = Counter((each.split, each.source) for each in clean)
    print(f"{len(clean)} prompts, {len(made) - len(clean)} left out")
    print(*(f"{split} {source}: {count}" for (split, source), count in sorted(found.items())), sep="\n")


def row(made: Made) -> dict[str, str]:
    return {"split": made.split, "source": made.source, "prompt": made.prompt}


def of_split(split: str, parts: list[str]) -> list[str]:
    """Those that are held out come last."""
    first = round(len(parts) * SPLITS["train"])
    return parts[:first] if split == "train" else parts[first:]


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


def summaries(texts: dict[str, list[str]], count: int, split: str, rng: random.Random) -> Iterator[Made]:
    """Stretches of whole paragraphs, of lengths even on a logarithmic scale; texts by the roots of their sizes."""
    long = {name: parts for name, parts in texts.items() if sum(map(len, parts)) >= 2 * SHORTEST}
    sizes = [math.sqrt(sum(map(len, parts))) for parts in long.values()]
    for _ in range(count if long else 0):
        passage = ""
        while len(passage) < SHORTEST:  # too near the end of a text
            (name,) = rng.choices(list(long), sizes)
            length = math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))
            start = rng.randrange(len(long[name]))
            passage = " ".join(_until(long[name][start:], length))[:LONGEST]
        yield Made(split, Path(name).stem, rng.choice(SUMMARIES).format(passage))


def questions_with_documents(
    texts: dict[str, list[str]], questions: list[Question], split: str, rng: random.Random
) -> Iterator[Made]:
    """Short questions, each below the paragraphs that say most of its rare words."""
    documents = [part for parts in texts.values() for part in parts if PARAGRAPH <= len(part) <= LONGEST]
    where = defaultdict(list)
    for index, document in enumerate(documents):
        for word in set(words(document)):
            where[word].append(index)
    for asked in questions:
        question = asked.turns[0]
        if (asked.split == "heldout") != (split == "heldout") or not (
            question.endswith("?") and "\n" not in question and len(question) < 120
        ):
            continue
        score: dict[int, float] = defaultdict(float)
        for word in sorted(set(words(question))):  # sums of scores, and ties, the same in every process
            for index in where[word]:
                score[index] += math.log(len(documents) / len(where[word]))
        found = [documents[index] for index in sorted(score, key=score.__getitem__, reverse=True)[:12]]
        said = "\n".join(_until(found, rng.uniform(1200, 3400)))[:LONGEST]
        if said:
            yield Made(
                split, "documents", rng.choice(WITH_DOCUMENTS).format(documents=said, question=question), question
            )


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
