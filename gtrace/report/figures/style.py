"""How figures look, and how they are written.

Colors are those that color-blind readers can distinguish. Every one is a key of :data:`DARK`, so that a page can
exchange it in dark mode: an SVG inside a page follows the page's colors. Files are PNG, SVG and PDF.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


INK = "#1b2330"
MUTED = "#5a6577"
GRID = "#e3e7ee"
PAPER = "#ffffff"
FRONT = "#9aa5b5"
MISSING_CELL = "#eceff3"

#: Line colours (Okabe and Ito's palette, without the yellow that vanishes on white), the darker shade of each that is
#: legible as text on white, and both on a dark page.
_LINES = {
    "blue": ("#0072b2", "#005f95", "#3d9fdc", "#6db8e8"),
    "orange": ("#e69f00", "#8a5f00", "#e69f00", "#f0b53a"),
    "green": ("#009e73", "#00755a", "#1fb98c", "#4fd0a9"),
    "vermillion": ("#d55e00", "#a84a00", "#ec7a22", "#f59a52"),
    "purple": ("#cc79a7", "#9b4a77", "#cc79a7", "#e0a3c5"),
    "sky": ("#56b4e9", "#1f6f9e", "#7cc8f2", "#9ad6f7"),
    "grey": ("#4d5665", "#4d5664", "#b4bdcb", "#c3cbd7"),
}

#: colour on white -> colour on a dark page
DARK = {
    INK: "#e6eaf1",
    MUTED: "#a3aec0",
    GRID: "#2c3542",
    PAPER: "#151a22",
    FRONT: "#5d6a7d",
    MISSING_CELL: "#222a35",
    **{own[k]: own[k + 2] for own in _LINES.values() for k in (0, 1)},
}

#: method -> colour, marker, line style: fixed, so that a method looks the same in every report.
_METHODS = {
    "none": ("grey", "o", "-"),
    "fp16": ("grey", "s", ":"),
    "bf16": ("grey", "D", ":"),
    "topk": ("grey", ">", "-"),
    "mem-sgd": ("grey", "X", "--"),
    "randomk": ("grey", "v", ":"),
    "dgc": ("grey", "<", "--"),
    "adacomp": ("grey", "d", "-."),
    "dropping": ("grey", "8", ":"),
    "qsgd": ("orange", "o", "-"),
    "prune": ("orange", "<", "--"),
    "topk-prune": ("orange", ">", ":"),
    "powersgd": ("orange", "h", "-."),
    "qsgdinf": ("blue", "s", "-"),
    "fp": ("blue", "p", "--"),
    "minmax": ("blue", "8", ":"),
    "int8": ("blue", "d", "-."),
    "nuqsgd": ("green", "D", "-"),
    "mcgq": ("green", "h", "-"),
    "terngrad": ("vermillion", "^", "-"),
    "zipml": ("vermillion", "*", "-"),
    "signsgd": ("vermillion", "p", "--"),
    "signum": ("vermillion", "s", ":"),
    "ef-signsgd": ("vermillion", "X", "--"),
    "onebit": ("vermillion", "d", "-."),
    "natural": ("purple", "v", "-"),
    "amq": ("purple", "X", "-"),
    "amq-n": ("purple", "d", "--"),
    "alq": ("sky", "P", "-"),
    "alq-n": ("sky", "p", "--"),
    "alqg": ("sky", "X", "-"),
    "alqg-n": ("sky", "h", "--"),
}

#: who chose a codec's bits in training -> colour, whatever the codec's own
_POLICIES = {"mqgrad": "vermillion", "adaptive": "green", "schedule": "purple"}
_MARKERS = "osD^vPXhp<>d8*"
_DASHES = ("-", "--", "-.", ":")
#: What goes around a codec shows in how much of its marker is filled.
_FILLS = {"": "full", "ef": "none", "rotate": "left", "momentum": "top", "accumulate": "bottom"}

#: Keys are Any because matplotlib's stubs list every one as a literal, newer ones than ours may know.
_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "text.color": INK,
    # A parameter called a$b$ is a name, not a formula.
    "text.parse_math": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "figure.facecolor": PAPER,
    "figure.dpi": 100.0,
    "svg.fonttype": "none",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a curve is drawn: line colour, text colour, marker, dash pattern, part of the marker that is filled."""

    line: str
    text: str
    marker: str
    dash: str
    fill: str

    def curve(self) -> dict[str, Any]:
        """Arguments of ``Axes.plot``."""
        return {
            "color": self.line,
            "marker": self.marker,
            "linestyle": self.dash,
            "fillstyle": self.fill,
            "markerfacecoloralt": PAPER,
        }


def look(method: str, variant: int = 0) -> Look:
    """The look of a method, always the same; further families of one method (``variant``) differ in marker and dashes.

    After ``@`` comes the policy that chose its bits. An unknown method gets a look of its own from its name. One with
    a prefix, e.g. ``ef:topk``, looks like the codec inside with its markers filled in part.
    """
    around, _, name = method.rpartition(":")
    name, _, policy = name.partition("@")
    if name in _METHODS:
        colour, marker, dash = _METHODS[name]
        colour = _POLICIES.get(policy, colour)
    else:
        digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=2).digest()
        colour = list(_LINES)[digest[0] % len(_LINES)]
        marker, dash = _MARKERS[digest[1] % len(_MARKERS)], "-"
    if variant:
        # Markers that no other method of this colour has, each method beginning at another one.
        same = [own for own, (hue, _, _) in _METHODS.items() if hue == colour]
        free = [m for m in _MARKERS if all((colour, m) != _METHODS[own][:2] for own in same)]
        first = 2 * same.index(name) if name in same else 0
        marker = free[(first + variant - 1) % len(free)]
        dash = _DASHES[(_DASHES.index(dash) + variant) % len(_DASHES)]
    if around:
        dash = _DASHES[(_DASHES.index(dash) + 2) % len(_DASHES)]
    return hue(colour, marker, dash, _FILLS.get(around, "bottom"))


def looks_of(methods: Mapping[str, str]) -> dict[str, Look]:
    """Look of each name by its method, empty for none: several of one method differ in marker and dashes."""
    # What is not a method, such as a tensor: up to 14 of them differ in colour or marker.
    colours = list(_LINES)
    free = (hue(colours[k % len(colours)], _MARKERS[k % len(_MARKERS)], _DASHES[k % 2]) for k in range(len(methods)))
    seen: Counter[str] = Counter()
    looks = {}
    for name, method in methods.items():
        looks[name] = look(method, seen[method]) if method else next(free)
        seen[method] += 1
    return looks


def hue(colour: str, marker: str, dash: str, fill: str = "full") -> Look:
    """A look from the palette: blue, orange, green, vermillion, purple, sky or grey."""
    line, text, *_ = _LINES[colour]
    return Look(line, text, marker, dash, fill)


@contextmanager
def styled() -> Iterator[None]:
    """Build a figure inside this context; the caller's own matplotlib settings come back after it."""
    with mpl.rc_context(), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes in a bitmap, and right in an SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, tied to no window and no global state."""
    return Figure(figsize=(width, height), layout="constrained")


def note(axes: Axes, x: float, y: float, text: str, **how: Any) -> None:
    """Small quiet text at a place of the axes, (0, 0) to (1, 1); ``how`` as of ``Axes.text``."""
    axes.text(x, y, text, **{"transform": axes.transAxes, "fontsize": 7.5, "color": MUTED, **how})


def say_empty(axes: Axes) -> None:
    """Axes without data say so, instead of standing there with ticks from 0 to 1."""
    axes.set(xticks=[], yticks=[])
    note(axes, 0.5, 0.5, "nothing to draw", ha="center", va="center", fontsize=None)


def plain_number(value: float, _position: int | None = None) -> str:
    """A tick label without mathematics: 0.01, 20, 1e-7, 2e6."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e5:
        return f"{value:.6g}"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def log_ticks(axis: Axis) -> None:
    """Logarithmic ticks with plain numbers; 2 and 5 are labelled too if there are few decades."""
    low, high = sorted(axis.get_view_interval())
    decades = 99.0 if low <= 0 else len(f"{high / low:.0f}")
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if decades <= 2 else (1.0,), numticks=9))
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_minor_formatter(NullFormatter())


#: Factor that a logarithmic axis spans at least.
_LEAST_SPAN = 3.0


def log_values(axes: Axes) -> None:
    """A logarithmic vertical axis of at least a factor of three, so that a wobble of a percent looks like one."""
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.autoscale_view()
    low, high = axes.get_ylim()
    if high < _LEAST_SPAN * low:
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / math.sqrt(_LEAST_SPAN), middle * math.sqrt(_LEAST_SPAN))
    log_ticks(axes.yaxis)


#: How a figure is written.
FigureKind = Literal["png", "svg", "pdf"]

#: Names of metadata that would hold a date, a version or an address, so that equal figures are equal bytes.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": "gtrace", "Format": None, "Type": None},
    "pdf": {"CreationDate": None, "Creator": "gtrace", "Producer": None},
}

_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"
_COLOUR = re.compile("|".join(DARK))
_CLIP = re.compile(rb'(?<=url\(#)p[0-9a-f]{10}(?=\))|(?<= id=")p[0-9a-f]{10}(?=")')
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
#: Verdana is as wide as DejaVu Sans, whose widths the layout was made with.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"


def render(figure: Figure, kind: FigureKind, *, text_as_paths: bool = True) -> bytes:
    """The file's bytes, the same on every call; a PNG has 200 dots per inch.

    In an SVG, letters are outlines and look the same everywhere, or stay text without ``text_as_paths``.
    """
    buffer = io.BytesIO()
    with styled():
        mpl.rcParams["svg.fonttype"] = "path" if text_as_paths else "none"
        mpl.rcParams["svg.hashsalt"] = "gtrace"
        # Outlines that a journal's checks accept; the default, Type 3, is refused by many.
        mpl.rcParams["pdf.fonttype"] = 42
        figure.savefig(buffer, format=kind, dpi=200, metadata=_METADATA[kind])
    # In an SVG, a clip's name is a hash of its place, whose last digit changes from process to process.
    names: dict[bytes, bytes] = {}
    return _CLIP.sub(lambda found: names.setdefault(found[0], b"clip%d" % len(names)), buffer.getvalue())


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """An ``<svg>`` element for a page: real text, colours as CSS variables, no reference to anything outside.

    Several figures can share a page by a ``prefix`` of every identifier. A screen reader says ``label``.
    """
    figure.patch.set_alpha(0)
    # Written by matplotlib a moment ago from escaped text: not untrusted.
    root = ET.fromstring(render(figure, "svg", text_as_paths=False))  # noqa: S314
    for parent in root.iter():
        for child in list(parent):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    values = [(key, value) for element in root.iter() for key, value in element.attrib.items()]
    used = {reference for _, value in values for reference in _REFERENCE.findall(value)}
    used |= {value[1:] for key, value in values if key == f"{_XLINK}href" and value.startswith("#")}
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        identifier = element.attrib.pop("id", None)
        if identifier in used:
            element.set("id", f"{prefix}-{identifier}")
        for key, value in list(element.attrib.items()):
            if key == f"{_XLINK}href":
                del element.attrib[key]
                element.set("href", f"#{prefix}-{value[1:]}" if value.startswith("#") else value)
                continue
            value = _REFERENCE.sub(lambda m: f"url(#{prefix}-{m[1]})", value)
            if key == "style":
                value = _COLOUR.sub(lambda m: f"var({variable(m[0])})", value)
                value = value.replace("'DejaVu Sans'", _FONTS)
            element.set(key, value)
    width = float(root.attrib.pop("width").removesuffix("pt"))
    root.attrib.pop("height")
    root.attrib.pop("version", None)
    style = f"width:{width * 4 / 3:.0f}px;stroke-linejoin:round;stroke-linecap:butt"
    root.attrib |= {"style": style, "role": "img", "aria-label": label}
    return ET.tostring(root, encoding="unicode")


def variable(colour: str) -> str:
    """The CSS variable of a colour of the style, a hex string."""
    return f"--c{colour[1:]}"


def variables() -> tuple[str, str]:
    """CSS that gives every colour its value on a light screen, and on a dark one."""
    light = "".join(f"{variable(colour)}:{colour};" for colour in DARK)
    return light, "".join(f"{variable(colour)}:{other};" for colour, other in DARK.items())
