"""Hugging Face Trainer on a tiny GPT-2 that is made on the spot."""

from importlib.util import find_spec

import pytest
import torch
from helpers_capture import Captured
from helpers_training import assert_recorded

# Importing it takes seconds, which every worker would spend at collection.
missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(missing != [], reason=f"not installed: {missing}"),
]


def fit(folder, **options):
    import transformers

    seen = []

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, _args, _state, _control, model=None, **_):
            seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(50, (12,), generator=generator) for _ in range(16)]
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    given = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "seed": 0}
    arguments = transformers.TrainingArguments(str(folder / "out"), **given, **quiet, **options)
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Keep()],
    )
    trainer.train()
    return model, seen


@pytest.mark.capture_case("Hugging Face Trainer", packages=("transformers", "accelerate"))
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 8),
        ({"gradient_accumulation_steps": 4}, 2),
        ({"bf16": True}, 8),
        ({"gradient_checkpointing": True, "label_smoothing_factor": 0.1, "max_grad_norm": 0.5}, 8),
    ],
    ids=["plain", "accumulated", "bf16", "checkpointed and smoothed"],
)
def test_train(tmp_path, options, steps):
    plain, _ = fit(tmp_path, **options)
    with Captured(tmp_path / "run.zarr") as run:
        model, seen = fit(tmp_path, **options)
    trace = run.trace
    # The head is tied to the embedding.
    assert {info.name for info in trace.tensors} == {name for name, _ in model.named_parameters()}
    assert {info.name: info.aliases for info in trace.tensors}["transformer.wte.weight"] == ("lm_head.weight",)
    assert len(seen) == steps
    assert_recorded(run, plain.state_dict(), model.state_dict(), seen)
