"""The compiled programs: caches are updated in place, and no temporary is a copy of a cache or of a weight matrix."""

import re

import jax
import numpy as np
import pytest
from models_on_mesh import engine

from jaxspec.mesh import MeshShape
from jaxspec.speculate.program import Variant

MESHES = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 2)]


@pytest.mark.parametrize(("draft", "tree"), [("ngram", "chain:4"), ("none", "none")], ids=["ngram", "plain"])
@pytest.mark.parametrize("has_lane", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_caches_stay_in_place(mesh, has_lane, draft, tree):
    # Pages many times larger than anything else, so that a copy of them can't hide.
    built = engine("llama_bias", MeshShape(*mesh), draft=draft, tree=tree, rounds=2, num_pages=4096)
    program = compiled(built, has_lane)
    state, memory = built._state, program.memory_analysis()
    on_a_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= on_a_device
    pages = state.cache.pages.addressable_shards[0].data
    assert memory.temp_size_in_bytes < pages.nbytes / 8
    assert not copies_of(program, pages.shape[1:])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_weight_matrix_is_copied(mesh):
    built = engine("llama_bias", MeshShape(*mesh), draft="ngram", tree="chain:4", rounds=2, num_pages=4096)
    program = compiled(built, has_lane=False)
    for weight in jax.tree.leaves(built.weights):
        shape = weight.addressable_shards[0].data.shape
        if np.prod(shape) > 1024 and len(shape) > 1:
            assert not copies_of(program, shape[-2:]), shape


def test_a_single_stage_sends_nothing_to_itself():
    built = engine("llama_bias", MeshShape(1, 1, 1), draft="ngram", tree="chain:4", rounds=2, num_pages=4096)
    text = compiled(built, has_lane=False).as_text()
    assert not re.search(r"collective-permute|all-(reduce|gather|to-all)", text)


def compiled(built, has_lane):
    return built.program(Variant(built.spec.pp == 1, has_lane, is_greedy=True, batch=1))


def copies_of(program, shape) -> list[str]:
    """Instructions that copy, or lay out anew, an array of this shape (with or without axes of size 1)."""
    return copying_lines(program.as_text(), shape)


def copying_lines(text: str, shape) -> list[str]:
    sizes = ",".join(str(size) for size in shape)
    pattern = re.compile(rf"= f32\[(?:1,)*{sizes}\]\S* (copy|transpose|dynamic-slice|slice)\(")
    return [line.strip() for line in text.splitlines() if pattern.search(line)]


def test_a_copy_would_be_noticed():
    text = "  %copy.1 = f32[1,4,8]{2,1,0} copy(%p)\n  %add.2 = f32[1,4,8]{2,1,0} add(%p, %p)"
    assert copying_lines(text, (4, 8)) == ["%copy.1 = f32[1,4,8]{2,1,0} copy(%p)"]
