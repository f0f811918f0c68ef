"""Training loops in the styles that people write, each a function that trains and returns what it trained.

``watch(optimizer, *models)`` notes by hand what the optimizer sees, and ``watch.loss(optimizer, value)`` what the
loop itself would log.
"""

import copy
import io
import itertools

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

#: name of the style -> the function
STYLES = {}


def style(name):
    def register(function):
        STYLES[name] = function
        return function

    return register


def learn(watch, optimizer, *losses, clip=lambda: None):
    optimizer.zero_grad()
    for loss in losses:
        loss.backward(retain_graph=loss is not losses[-1])
    watch.loss(optimizer, sum(loss.item() for loss in losses))
    clip()
    optimizer.step()


def fit(watch, model, optimizer, steps=3, inputs=6, classes=3):
    for _ in range(steps):
        loss = functional.cross_entropy(model(torch.randn(5, inputs)), torch.randint(classes, (5,)))
        learn(watch, optimizer, loss)


def network(*widths):
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU(True))]
    return nn.Sequential(*layers[:-1])


@style("GAN: two optimizers, detached fakes")
def gan(watch):
    generator = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 1, 1)
    )
    critic = nn.Sequential(nn.Conv2d(1, 4, 4), nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(4, 1))
    of_critic = watch(torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.5, 0.999)), critic)
    of_generator = watch(torch.optim.Adam(generator.parameters(), 1e-2, betas=(0.5, 0.999)), generator)
    judge = nn.BCEWithLogitsLoss()
    for _ in range(3):
        critic.zero_grad()
        real = judge(critic(torch.randn(4, 1, 4, 4)), torch.ones(4, 1))
        real.backward()
        fakes = generator(torch.randn(4, 4, 1, 1))
        fake = judge(critic(fakes.detach()), torch.zeros(4, 1))
        fake.backward()
        watch.loss(of_critic, real.item() + fake.item())
        of_critic.step()
        generator.zero_grad()
        fooled = judge(critic(fakes), torch.ones(4, 1))
        fooled.backward()
        watch.loss(of_generator, fooled)
        of_generator.step()
    return generator, critic


@style("WGAN-GP: autograd.grad with create_graph, backward with a factor")
def wgan(watch):
    generator, critic = network(4, 8, 2), network(2, 8, 1)
    of_critic = watch(torch.optim.RMSprop(critic.parameters(), 1e-2), critic)
    of_generator = watch(torch.optim.RMSprop(generator.parameters(), 1e-2), generator)
    one = torch.tensor(1.0)
    for _ in range(2):
        for _ in range(2):
            critic.zero_grad()
            real, fake = torch.randn(4, 2), generator(torch.randn(4, 4)).detach()
            score = critic(real).mean()
            score.backward(-one)
            other = critic(fake).mean()
            other.backward(one)
            between = ((real + fake) / 2).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
            penalty.backward()
            watch.loss(of_critic, other.item() - score.item() + penalty.item())
            of_critic.step()
        generator.zero_grad()
        score = critic(generator(torch.randn(4, 4))).mean()
        score.backward(-one)
        watch.loss(of_generator, -score.item())
        of_generator.step()
    return generator, critic


@style("VAE: two losses on one graph")
def vae(watch):
    encoder, decoder = nn.Linear(8, 4), nn.Linear(2, 8)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = watch(torch.optim.Adam(model.parameters(), 1e-2), model)
    for _ in range(3):
        x = torch.rand(4, 8)
        mean, log_variance = encoder(x).chunk(2, dim=1)
        z = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        reconstruction = functional.binary_cross_entropy_with_logits(decoder(z), x)
        learn(watch, optimizer, reconstruction, -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean())
    return (model,)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(12, 8), nn.LSTM(8, 8), nn.Linear(8, 12)
        self.head.weight = self.embed.weight

    def forward(self, tokens, state=None):
        # Not every CPU has an LSTM in bfloat16.
        with torch.autocast("cpu", enabled=False):
            out, state = self.lstm(self.embed(tokens), state)
        return self.head(out), state


@style("language model: truncated backpropagation, tied weights, clipping")
def truncated(watch):
    model, state, tokens = Language(), None, torch.randint(12, (16, 3))
    optimizer = watch(torch.optim.SGD(model.parameters(), 1.0), model)
    for start in (0, 5, 10):
        state = None if state is None else tuple(part.detach() for part in state)
        out, state = model(tokens[start : start + 5], state)
        loss = functional.cross_entropy(out.flatten(0, 1), tokens[start + 1 : start + 6].flatten())
        learn(watch, optimizer, loss, clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.25))
    return (model,)


@style("language model: autocast, accumulation, fused AdamW with two groups, disabled scaler")
def accumulated(watch):
    model = Language()
    vectors, matrices = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (False, True))
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
    optimizer = watch(torch.optim.AdamW(groups, 1e-2, fused=True), model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        total = 0.0
        for _ in range(3):
            tokens = torch.randint(12, (6, 2))
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(tokens[:-1])[0].flatten(0, 1), tokens[1:].flatten()) / 3
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        watch.loss(optimizer, total)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return (model,)


@style("copies of the model while it trains: teacher, EMA, SWA")
def copies(watch):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = watch(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    averaged, data = AveragedModel(model), [torch.randn(5, 6) for _ in range(4)]
    teacher = copy.deepcopy(model).requires_grad_(False)
    for x in data:
        with torch.no_grad():
            target = teacher(x)
        learn(watch, optimizer, (model(x) - target).square().mean() + model(x).square().mean())
        averaged.update_parameters(model)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    update_bn(data, averaged)
    return model, averaged, teacher


@style("layers unfrozen one by one, then another optimizer, then another head")
def unfrozen(watch):
    model = network(6, 8, 8, 3).requires_grad_(False)
    model[4].requires_grad_(True)
    optimizer = watch(torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), 1e-2), model)
    fit(watch, model, optimizer)
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3})
    fit(watch, model, optimizer)
    model.requires_grad_(True)
    fit(watch, model, watch(torch.optim.SGD(model.parameters(), 0.1), model))
    model[4] = nn.Linear(8, 5)
    fit(watch, model, watch(torch.optim.SGD(model.parameters(), 0.1), model), classes=5)
    return (model,)


@style("meta-learning: inner steps by functional_call, and by optimizers of copies")
def meta(watch):
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    outer = watch(torch.optim.Adam(model.parameters(), 1e-2), model)
    for _ in range(2):
        x = torch.randn(6, 1)
        inner = dict(model.named_parameters())
        loss = functional.mse_loss(functional_call(model, inner, (x,)), x.sin())
        slopes = torch.autograd.grad(loss, list(inner.values()), create_graph=True)
        inner = {name: p - 0.1 * slope for (name, p), slope in zip(inner.items(), slopes, strict=True)}
        learn(watch, outer, functional.mse_loss(functional_call(model, inner, (x,)), x.sin()))
    for _ in range(6):
        task = copy.deepcopy(model)
        whole = nn.Sequential(task, nn.Linear(1, 3).requires_grad_(False))
        fit(watch, whole, watch(torch.optim.SGD(task.parameters(), 0.1), whole), steps=2, inputs=1)
        with torch.no_grad():
            for p, q in zip(model.parameters(), task.parameters(), strict=True):
                p.lerp_(q, 0.1)
    return (model,)


@style("activation checkpoints, weight_norm and spectral_norm, saved and loaded half-way")
def checkpoints(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = weight_norm(nn.Linear(6, 8)), spectral_norm(nn.Linear(8, 8))
            self.c, self.drop = nn.utils.spectral_norm(nn.Linear(8, 3)), nn.Dropout(0.1)

        def forward(self, x):
            x = checkpoint(lambda t: self.drop(self.a(t).relu()), x, use_reentrant=False)
            return self.c(checkpoint(self.b, x, use_reentrant=True))

    model = Net()
    optimizer = watch(torch.optim.NAdam(model.parameters(), 1e-2), model)
    fit(watch, model, optimizer)
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (model, optimizer)], file)
    file.seek(0)
    for one, saved in zip((model, optimizer), torch.load(file), strict=True):
        one.load_state_dict(saved)
    fit(watch, model, optimizer)
    return (model,)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0].abs() < 1)


@style("fake quantization, functions and hooks of one's own, gradients zeroed by hand")
def quantized(watch):
    class Quantized(nn.Linear):
        def forward(self, x):
            weight = torch.fake_quantize_per_tensor_affine(self.weight, 0.05, 0, -128, 127)
            return functional.linear(Rounded.apply(x), weight, self.bias)

    model, seen = nn.Sequential(Quantized(6, 8), nn.ReLU(), Quantized(8, 3)), []
    model[0].weight.register_hook(lambda gradient: gradient / 2)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    model[2].register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0].sum()))
    optimizer = watch(torch.optim.Adagrad(model.parameters(), 1e-2), model)
    for _ in range(3):
        loss = functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,)))
        loss.backward()
        watch.loss(optimizer, loss)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.grad.zero_()
    return model, torch.stack(seen)


@style("reinforcement: a policy and its target network, clipped values")
def reinforced(watch):
    net = network(4, 8, 2)
    target = copy.deepcopy(net)
    optimizer = watch(torch.optim.AdamW(net.parameters(), 1e-2, amsgrad=True), net)
    for _ in range(4):
        state, action = torch.randn(6, 4), torch.randint(2, (6, 1))
        with torch.no_grad():
            goal = torch.rand(6, 1) + 0.9 * target(torch.randn(6, 4)).max(1, keepdim=True).values
        loss = functional.smooth_l1_loss(net(state).gather(1, action), goal)
        learn(watch, optimizer, loss, clip=lambda: nn.utils.clip_grad_value_(net.parameters(), 0.01))
        target.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()})
    return net, target


@style("gradients put together by hand (PCGrad)")
def by_hand(watch):
    trunk, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3)])
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    optimizer = watch(torch.optim.Rprop(model.parameters()), model)
    for _ in range(3):
        hidden = trunk(torch.randn(5, 6)).relu()
        losses = [head(hidden).square().mean() for head in heads]
        parts = [torch.autograd.grad(loss, list(trunk.parameters()), retain_graph=True) for loss in losses]
        optimizer.zero_grad()
        sum(losses).backward()
        for p, a, b in zip(trunk.parameters(), *parts, strict=True):
            p.grad = a + b - b * (a * b).sum().clamp(max=0)
        watch.loss(optimizer, sum(losses))
        optimizer.step()
    return (model,)


@style("two optimizers at different rates, one wrapped (Lookahead)")
def rates(watch):
    class Lookahead:
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

        def step(self):
            self.optimizer.step()
            for slow, p in zip(self.slow, self.optimizer.param_groups[0]["params"], strict=True):
                p.data.copy_(slow.lerp_(p.data, 0.5))

    body, head = nn.Linear(6, 8), nn.Linear(8, 3)
    fast = watch(torch.optim.SGD(head.parameters(), 0.1), head)
    slow = Lookahead(watch(torch.optim.Adam(body.parameters()), body))
    for step in range(6):
        functional.cross_entropy(head(body(torch.randn(5, 6)).tanh()), torch.randint(3, (5,))).backward()
        fast.step()
        fast.zero_grad()
        if step % 3 == 2:
            slow.step()
            slow.optimizer.zero_grad()
    return body, head


@style("an optimizer that steps inside the closure of another one")
def inside(watch):
    outer_model, inner_model = network(6, 8, 3), network(6, 8, 3)
    outer = watch(torch.optim.SGD(outer_model.parameters(), 0.1), outer_model)
    inner = watch(torch.optim.SGD(inner_model.parameters(), 0.1), inner_model)

    def closure():
        fit(watch, inner_model, inner, steps=1)
        outer.zero_grad()
        loss = (outer_model(x) - inner_model(x).detach()).square().mean()
        loss.backward()
        watch.loss(outer, loss)
        return loss

    for _ in range(3):
        x = torch.randn(5, 6)
        outer.step(closure)
    return outer_model, inner_model
