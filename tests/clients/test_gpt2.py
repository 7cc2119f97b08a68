"""transformers: the ways to give its Trainer an optimizer, and what libmuon makes of GPT-2."""

from __future__ import annotations

import libmuon
from transformers import GPT2Config, GPT2LMHeadModel


def test_three_ways_into_the_trainer_give_equal_losses(result):
    ways = result("gpt2")["ways"]
    assert set(ways) == {"factory", "class", "optimizers"}
    assert ways["factory"] == ways["class"] == ways["optimizers"]


def test_gpt2_is_divided_as_it_should_be():
    config = GPT2Config(vocab_size=98, n_positions=16, n_embd=24, n_layer=1, n_head=2)
    rules = [("*.attn.c_attn.weight", {"num_heads": 3})]
    groups = libmuon.group_parameters(GPT2LMHeadModel(config), rules)
    optimizer = libmuon.Muon(groups, lr=1e-3)
    described = {line.split()[0]: line for line in optimizer.describe().splitlines() if line}
    for name, matrices in (
        ("attn.c_attn", "3 of 24x24"),  # stored 24x72: columns are query, key, value
        ("attn.c_proj", "24x24"),
        ("mlp.c_fc", "96x24"),  # stored 24x96
        ("mlp.c_proj", "24x96"),
    ):
        line = described[f"transformer.h.0.{name}.weight"]
        assert f" {matrices} " in line
        assert " muon " in line
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):  # wte is also the head
        assert " adamw " in described[name]
