"""Leads of the likeliest token, against logits that other tests compare with transformers."""

import numpy as np
import pytest
from models_on_mesh import FileReader, full_logits, load
from test_acceptance import DRAFTED

from jaxspec.evaluate.acceptance import with_leads
from jaxspec.evaluate.margins import leads
from jaxspec.evaluate.report import as_json, as_tables

MODEL = "llama3"


def test_leads_are_those_of_the_last_tokens():
    config, tensors, _ = load(MODEL)
    random = np.random.default_rng(0)
    texts = [random.integers(0, config.vocab_size, length).tolist() for length in (1, 7, 60)]
    found = leads(FileReader(tensors), config, np.dtype("float32"), texts)
    for text, lead in zip(texts, found, strict=True):
        second, best = np.sort(full_logits(MODEL, text)[-1])[-2:]
        assert lead == pytest.approx(best - second, abs=1e-4)
    assert leads(FileReader(tensors), config, np.dtype("float32"), []) == []


def test_answers_that_differ_get_the_lead_where_they_first_do():
    asked = []

    def measure(texts):
        asked.extend(texts)
        return [0.0125]

    (run,) = with_leads([DRAFTED], measure)
    assert asked == [[1, 2]]  # the prompt: the third answer differs from its first token on
    assert [answer.lead for answer in run.answers] == [None, None, 0.0125]
    line = as_tables(DRAFTED, [run]).splitlines()[-1]
    assert line.startswith("ngram chain:3: 1 of 3 answers differ") and "led by 0.013 at most" in line
    assert [answer["lead"] for answer in as_json(DRAFTED, [run])[1]["answers"]] == [None, None, 0.0125]
