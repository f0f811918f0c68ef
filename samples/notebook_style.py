"""From a training loop to a justified codec in Python: record, sweep, report. Run it, or open it as a notebook.

    python notebook_style.py --steps 40

Editors show every `# %%` as a cell.
"""

# %% Train a small network on the handwritten digits, and record its gradients.
import argparse
import importlib.util
from pathlib import Path

import torch
from torch import nn

import gtrace
from gtrace import capture

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--folder", type=Path, default=Path(), help="where the trace and the report go")
args, _ = parser.parse_known_args()  # a notebook has arguments of its own

spec = importlib.util.spec_from_file_location("digits_mlp", Path(__file__).resolve().with_name("digits_mlp.py"))
digits_mlp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(digits_mlp)
images, digits = digits_mlp.load_digits()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
last = args.steps - 1
with capture.record(model, optimizer, args.folder / "digits.zarr", steps=f"0-3,{last - 3}-{last}", force=True):
    for _ in range(args.steps):
        batch = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), digits[batch])
        loss.backward()
        optimizer.step()
print(f"loss {loss.item():.3f} after {args.steps} steps")

# %% What is in the trace.
trace = gtrace.open_trace(args.folder / "digits.zarr")
for tensor in trace.tensors:
    print(f"{tensor.name:10} {tensor.shape}  steps {trace.steps(tensor.name)}")

# %% Measure codecs on it: each at several bits, on every tensor and step.
result = gtrace.sweep(trace, "qsgdinf,nuqsgd,alq", bits=range(2, 6))
print(f"{len(result)} rows; columns such as {', '.join(list(result.columns)[:6])}")

# %% Which codec has the least error at two measured bits?
analysis = gtrace.report.analyze(result, "digits", targets=[2.0])
for standing in analysis.standings(2.0):
    print(f"{standing.family:10} loses {standing.error:.2%} of gradient energy at {standing.bits:.2f} measured bits")

# %% The same as a page with figures.
page = gtrace.report.write_html(args.folder / "digits.report.html", [result], title="Digits", force=True)
print(f"page: {page}")
