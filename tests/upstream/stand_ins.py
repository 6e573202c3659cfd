"""Local stand-ins for the models that kvpress's tests load from the Hugging Face hub, made when the tests run.

They are laid out as the hub's own download cache, so that nothing is intercepted: with `HF_HOME` on that folder and
`HF_HUB_OFFLINE=1`, `from_pretrained("MaxJeblick/llama2-0b-unit-test")` finds them, by the name that the tests use.

The model is a random Llama; the tokenizer is a byte-level BPE trained on the tests' own sentences, which splits digits
and punctuation as Llama 2's does: the tests count the tokens of their context.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStats, ExpectedAttentionStatsPress
from kvpress.presses.qfilter_press import QFilters
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = ("MaxJeblick/llama2-0b-unit-test", "maxjeblick/llama2-0b-unit-test")  # the tests write it both ways
REVISION = "0" * 40
VOCABULARY = 4096  # the tests draw token ids below 3,000
SPECIAL = ("<unk>", "<s>", "</s>")
CORPUS = (
    "This is a test article. It was written on 2022-01-01.", "When was this article written?",
    "The quick brown fox jumps over the lazy dog.", "What animal jumps over the dog?",
    "What is the best KV cache compression library in the world ?", "Repeat the last sentence",
)  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without chat template, every id of which has a text of its own."""
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    written = json.loads(tokenizer.to_str())
    vocabulary = written["model"]["vocab"]
    for index in range(len(vocabulary), VOCABULARY):  # a random model writes any id: an answer must not come out empty
        vocabulary[f"Ġw{index}"] = index
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def make_model() -> LlamaForCausalLM:
    """A random Llama, float32, of the shape that the tests assert: 2 layers, 2 heads, head_dim 6."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model


def _snapshot(home: Path, name: str) -> Path:
    """The folder of one repository in the hub's cache."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    folder = repository / "snapshots" / REVISION
    folder.mkdir(parents=True)
    return folder


def make_hub(home: Path) -> None:
    """Write the stand-ins to `home`, to be used as `HF_HOME`."""
    model, tokenizer = make_model(), make_tokenizer()
    config = model.config
    for name in NAMES:
        folder = _snapshot(home, name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    filters = QFilters(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    torch.nn.init.normal_(filters.q_filters)
    filters.save_pretrained(_snapshot(home, f"nthngdy/{NAMES[0].split('/')[1]}_qfilt"))
    press = ExpectedAttentionStatsPress()
    stats = ExpectedAttentionStats(
        num_layers=config.num_hidden_layers, num_heads=config.num_attention_heads, head_dim=config.head_dim,
        dataset_name=press.dataset_name, model_name=NAMES[0], num_samples=press.num_samples,
        sample_seq_len=press.sample_seq_len, n_sink=press.n_sink,
    )  # fmt: skip
    torch.nn.init.normal_(stats.query_mean)
    with torch.no_grad():
        stats.query_cov.copy_(torch.eye(config.head_dim).expand_as(stats.query_cov))
    stats.save_pretrained(_snapshot(home, stats.stats_id()))
